"""What `bench.py kernels` compares: for each operation its sizes, its inputs, its functions and the work it must do.

All functions of an operation compute the same of the same numbers. kernels.py adds 'compile', torch.compile of 'eager':

    nanocria        kernels/
    eager           plain PyTorch as Hugging Face's Llama writes it: the compute dtype, with statistics in fp32
    torch           PyTorch's own operator, if it has one; for attention sdpa_flash and sdpa_cudnn, by backend
    liger           Liger-Kernel: Hsu et al., 2024. https://github.com/linkedin/Liger-Kernel
    fa4             FlashAttention 4: Dao et al. https://github.com/Dao-AILab/flash-attention
    cce             Cut your losses: Wijmans et al., 2024. It skips the gradients of improbable tokens: see its error
    bitsandbytes    Dettmers et al., 2021 and 2023. Its 8-bit AdamW updates bfloat16 parameters without masters

    pip install liger-kernel==0.8.5 cut-cross-entropy==25.1.1 bitsandbytes==0.50.2 "flash-attn-4[cu13]==4.0.0b36"

Libraries are optional: the functions of one that is missing fail. They are called with their defaults, as their own
patches of Hugging Face's models call them. Some of Liger-Kernel's overwrite their inputs with gradients, a legitimate
choice that saves memory. Repeated calls then read meaningless numbers, at the same speed; their errors are measured on
fresh inputs.
"""

import functools
import importlib
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import kernels
from kernels import reference
from kernels.fp8_linear import quantize, quantize_reference, scaled_mm, transpose

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it mistakes our kernels/ for another package


def optional(module: str):
    try:
        return importlib.import_module(module)
    except Exception as error:  # not installed, or Triton without a driver
        print(f"{module} is left out: {error}", file=sys.stderr)


liger = optional("liger_kernel.transformers.functional")
cut_cross_entropy = optional("cut_cross_entropy")
bnb = optional("bitsandbytes.functional")
fa4 = optional("flash_attn.cute")

NORM_EPS = 1e-5
VOCAB = 128256  # Llama 3's
BF16_CUDA = {"device": "cuda", "dtype": torch.bfloat16}


@dataclass(frozen=True)
class Operation:
    dims: str  # the names of a size's numbers: model.py's letters
    sizes: list[tuple[int, ...]]
    inputs: Callable  # (size, options of torch.empty) -> differentiable tensors, constants
    work: Callable  # size -> {pass: {"bytes": ...} or {"flops": ...}}; its keys are the passes to measure
    functions: dict[str, Callable]
    reference: Callable  # errors are measured against it, run in float64
    floor: Callable | None = None  # size -> calls whose times add up to the limit, if that is measured
    unpack: Callable | None = None  # if ours are packed: the differentiable tensors as the others take them
    checked: Callable = staticmethod(lambda size: size)  # the size to measure errors at: smaller if float64 needs it

    def tensors_of(self, function: Callable, tensors: list) -> list:
        """The differentiable tensors, or their gradients, as this function takes them."""
        takes_packed = function in (self.functions["nanocria"], self.reference)
        return tensors if takes_packed or not self.unpack else self.unpack(*tensors)


OPERATIONS: dict[str, Operation] = {}


def passes(tensor_bytes: int, **tensors: int) -> dict[str, dict]:
    """The work of passes that move so many tensors of tensor_bytes."""
    return {name: {"bytes": count * tensor_bytes} for name, count in tensors.items()}


def first_rows(size):
    return (min(size[0], 1024), *size[1:])


# --- RMSNorm, with and without the addition before it ---


def eager_rms_norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPS)).to(x.dtype)


def torch_rms_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, NORM_EPS)


def after_add(norm):
    def add_norm(x, residual, weight):
        total = x + residual
        return norm(total, weight), total

    return add_norm


def norm(kernel, exact, n_inputs, forward, backward, **others):
    """A norm of n_inputs tensors (N, C) and a weight (C,); its passes move `forward` and `backward` tensors (N, C)."""

    def inputs(size, options):
        tensors = [torch.randn(size, **options) for _ in range(n_inputs)]
        weight = 1 + 0.1 * torch.randn(size[1], **options)  # near 1, as in a trained model
        return [*tensors, weight], ()

    return Operation(
        dims="N C",
        sizes=[(16384, 2048), (16384, 3072), (16384, 4096), (8192, 8192), (4096, 16384)],
        inputs=inputs,
        work=lambda size: passes(2 * math.prod(size), forward=forward, backward=backward),
        functions={"nanocria": partial(kernel, eps=NORM_EPS), **others},
        reference=partial(exact, eps=NORM_EPS),
    )


OPERATIONS["rms_norm"] = norm(
    kernels.rms_norm, reference.rms_norm, n_inputs=1, forward=2, backward=3, eager=eager_rms_norm, torch=torch_rms_norm,
    liger=lambda x, weight: liger.liger_rms_norm(x, weight, NORM_EPS),
)  # fmt: skip
OPERATIONS["add_rms_norm"] = norm(
    kernels.add_rms_norm, reference.add_rms_norm, n_inputs=2, forward=4, backward=4, eager=after_add(eager_rms_norm),
    torch=after_add(torch_rms_norm),
    liger=lambda x, residual, weight: liger.liger_fused_add_rms_norm(x, residual, weight, NORM_EPS),
)  # fmt: skip

# --- RoPE of a packed projection: q and k rotated, v copied, all three independent of the packed tensor ---


def split_heads(qkv, n_head):
    n_kv_head = (qkv.shape[2] - n_head) // 2
    return qkv.split([n_head, n_kv_head, n_kv_head], dim=2)


def eager_rope(qkv, cos, sin, n_head, wide_cos, wide_sin):
    q, k, v = split_heads(qkv, n_head)
    wide_cos = wide_cos[:, None]  # (T, 1, D)
    wide_sin = wide_sin[:, None]
    return *(x * wide_cos + rotate_half(x) * wide_sin for x in (q, k)), v.contiguous()


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rope_inputs(size, options):
    """qkv (B, T, H+2K, D); cos and sin (T, D/2) in fp32, H, and the tables (T, D) in qkv's dtype that others take."""
    n_batch, n_time, n_head, n_kv_head, head_dim = size
    frequencies = 500000.0 ** -torch.linspace(0, 1, head_dim // 2 + 1, device=options["device"])[:-1]
    angles = torch.outer(torch.arange(n_time, device=options["device"]), frequencies)  # (T, D/2)
    cos = angles.cos()
    sin = angles.sin()
    wide_tables = [torch.cat([table, table], dim=-1).to(options["dtype"]) for table in (cos, sin)]
    qkv = torch.randn(n_batch, n_time, n_head + 2 * n_kv_head, head_dim, **options)
    return [qkv], (cos, sin, n_head, *wide_tables)


def liger_rope(qkv, cos, sin, n_head, wide_cos, wide_sin):
    q, k, v = split_heads(qkv, n_head)
    q, k = liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), wide_cos, wide_sin)  # (B, heads, T, D)
    return q.transpose(1, 2), k.transpose(1, 2), v.contiguous()


OPERATIONS["rope"] = Operation(
    dims="B T H K D",
    sizes=[(8, 2048, 32, 8, 64), (4, 4096, 24, 8, 128), (4, 4096, 32, 8, 128)],
    inputs=rope_inputs,
    work=lambda size: passes(2 * size[0] * size[1] * (size[2] + 2 * size[3]) * size[4], forward=2, backward=2),
    functions={
        "nanocria": lambda qkv, cos, sin, n_head, *_: kernels.rope(qkv, cos, sin, n_head),
        "eager": eager_rope,
        "liger": liger_rope,
    },
    reference=lambda qkv, cos, sin, n_head, *_: reference.rope(qkv, cos, sin, n_head),
)

# --- SwiGLU and GeGLU. Ours reads one packed tensor; Hugging Face's models have two, so the others get two. ---


def glu(activation, **others):
    return Operation(
        dims="N F",
        sizes=[(16384, 8192), (16384, 14336), (4096, 16384)],
        inputs=lambda size, options: ([torch.randn(size[0], 2 * size[1], **options)], ()),
        work=lambda size: passes(2 * math.prod(size), forward=3, backward=5),
        functions={"nanocria": partial(kernels.glu, activation=activation), **others},
        reference=partial(reference.glu, activation=activation),
        unpack=lambda gate_up: [half.contiguous() for half in gate_up.chunk(2, dim=-1)],
    )


OPERATIONS["swiglu"] = glu(
    "silu", eager=lambda gate, up: F.silu(gate) * up, liger=lambda gate, up: liger.liger_swiglu(gate, up)
)
OPERATIONS["geglu"] = glu(
    "gelu_tanh", eager=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    liger=lambda gate, up: liger.liger_geglu(gate, up),
)  # fmt: skip

# --- Cross-entropy. Ours and Liger's compute a needed gradient in forward: hence the passes 'inference' and 'both' ---


def eager_cross_entropy(logits, targets):
    return F.cross_entropy(logits.float(), targets)


def random_targets(n_rows, n_vocab, options):
    return (torch.randint(n_vocab, (n_rows,), device=options["device"]),)


OPERATIONS["cross_entropy"] = Operation(
    dims="N V",
    sizes=[(4096, 40960), (4096, 81920), (4096, VOCAB), (4096, 163840)],
    inputs=lambda size, options: ([torch.randn(size, **options)], random_targets(*size, options)),
    work=lambda size: passes(2 * math.prod(size), inference=1, both=2),
    functions={
        "nanocria": kernels.cross_entropy,
        "eager": eager_cross_entropy,
        "torch": F.cross_entropy,
        "liger": lambda logits, targets: liger.liger_cross_entropy(logits, targets),
    },
    reference=reference.cross_entropy,
    checked=first_rows,
)

# --- The head and its loss: one pass forward and backward, whose limit is its three matmuls, measured ---


def loss_inputs(size, options):
    """Logits of deviation 0.9, as in an initialized Llama 3.2 1B. cut-cross-entropy skips improbable tokens: on
    an H200 it takes 1.7 times as long as the matmuls at 0.9, 2.5 times at 1.0, 3.9 times at 1.3."""
    n_tokens, n_embd, n_vocab = size
    x = torch.randn(n_tokens, n_embd, **options)
    weight = 0.9 * n_embd**-0.5 * torch.randn(n_vocab, n_embd, **options)
    return [x, weight], random_targets(n_tokens, n_vocab, options)


def matmuls_alone(size):
    """The loss head's three matmuls without chunks: the logits, dx and dW."""
    n_tokens, n_embd, n_vocab = size
    (x, weight), _ = loss_inputs(size, BF16_CUDA)
    logits = torch.empty(n_tokens, n_vocab, **BF16_CUDA)
    dx = torch.empty_like(x)
    dweight = torch.empty_like(weight)
    return [
        partial(torch.mm, x, weight.T, out=logits),
        partial(torch.mm, logits, weight, out=dx),
        partial(torch.mm, logits.T, x, out=dweight),
    ]


OPERATIONS["linear_cross_entropy"] = Operation(
    dims="N C V",
    sizes=[(4096, 2048, VOCAB), (16384, 2048, VOCAB), (32768, 2048, VOCAB), (16384, 3072, VOCAB), (16384, 4096, VOCAB)],
    inputs=loss_inputs,
    work=lambda size: {"both": {"flops": 3 * 2 * math.prod(size)}},
    functions={
        "nanocria": kernels.linear_cross_entropy,
        "eager": lambda x, weight, targets: eager_cross_entropy(x @ weight.T, targets),
        "torch": lambda *inputs: F.linear_cross_entropy(*inputs, options=torch.nn.LinearCrossEntropyOptions()),  # 2.13
        "liger": lambda *inputs: liger.liger_fused_linear_cross_entropy(*inputs),
        "liger_fp32": lambda *inputs: liger.liger_fused_linear_cross_entropy(*inputs, accum_dtype=torch.float32),
        "cce": lambda *inputs: cut_cross_entropy.linear_cross_entropy(*inputs),
    },
    reference=reference.linear_cross_entropy,
    floor=matmuls_alone,
    checked=first_rows,
)  # fmt: skip

# --- A linear layer in float8, beside bfloat16's: the MLP's of Llama 3.2 1B and 3.1 8B, gate and up, and down ---


def linear_inputs(size, options):
    n_tokens, n_in, n_out = size
    return [torch.randn(n_tokens, n_in, **options), n_in**-0.5 * torch.randn(n_out, n_in, **options)], ()


def fp8_matmuls_alone(size):
    """The matmuls alone: y and dx from operands already in float8, dW in bfloat16."""
    n_tokens, n_in, n_out = size
    (x, weight), _ = linear_inputs(size, BF16_CUDA)
    dy = torch.randn(n_tokens, n_out, **BF16_CUDA)
    (x8, s), (w8, t), (wt8, one), (dy8, u) = map(quantize, (x, weight, weight.T, dy))
    return [
        partial(scaled_mm, x8, w8, s, t.T, torch.bfloat16, None),
        partial(scaled_mm, dy8, wt8, u, one.T, torch.bfloat16, None),
        partial(torch.mm, dy.T, x),
    ]


OPERATIONS["fp8_linear"] = Operation(
    dims="N C O",
    sizes=[(16384, 2048, 16384), (16384, 8192, 2048), (16384, 4096, 28672), (16384, 14336, 4096)],
    inputs=linear_inputs,
    work=lambda size: {"both": {"flops": 3 * 2 * math.prod(size)}},
    functions={"nanocria": kernels.fp8_linear, "eager": F.linear},
    reference=F.linear,
    floor=fp8_matmuls_alone,
    checked=first_rows,
)

# --- All that a micro-batch does to a weight in float8: round it in forward, round and transpose it in backward ---


def rounded_twice(quantize, transpose, weight):
    w8, t = quantize(weight)
    again, _ = quantize(weight)
    return w8, t, transpose(again)


def eager_rounded_twice(weight):
    return rounded_twice(quantize_reference, lambda x8: x8.T.contiguous(), weight)


OPERATIONS["fp8_weight"] = Operation(
    dims="O C",
    sizes=[(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)],  # of Llama 3.2 1B: q, k, v; o; gate, up; down
    inputs=lambda size, options: ([], (torch.randn(size, **options),)),
    work=lambda size: {"forward": {"bytes": 8 * math.prod(size)}},
    functions={"nanocria": partial(rounded_twice, quantize, transpose), "eager": eager_rounded_twice},
    reference=eager_rounded_twice,
)

# --- Causal attention with grouped keys and values. q (B, T, H, D), k and v (B, T, K, D) ---


def eager_attention(q, k, v):
    """Scores, softmax and product one after the other, (B, H, T, T) in memory between them."""
    _, n_time, n_head, head_dim = q.shape
    q = q.transpose(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(n_head // x.shape[2], dim=1) for x in (k, v))
    future = torch.ones(n_time, n_time, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) * head_dim**-0.5).masked_fill(future, float("-inf"))  # (B, H, T, T)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def sdpa(backend, q, k, v):
    """PyTorch's fused attention by one backend."""
    with torch.nn.attention.sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def attention_inputs(size, options):
    n_batch, n_time, n_head, n_kv_head, head_dim = size
    return [torch.randn(n_batch, n_time, heads, head_dim, **options) for heads in (n_head, n_kv_head, n_kv_head)], ()


def attention_work(size):
    """Two matmuls forward and five backward, over the T(T+1)/2 pairs that are not masked."""
    n_batch, n_time, n_head, _, head_dim = size
    matmul = n_batch * n_head * n_time * (n_time + 1) * head_dim
    return {"forward": {"flops": 2 * matmul}, "backward": {"flops": 5 * matmul}}


OPERATIONS["flash_attention"] = Operation(
    dims="B T H K D",
    sizes=[
        *((batch, n_time, 32, 8, 64) for batch, n_time in [(8, 2048), (2, 8192), (1, 16384), (1, 32768)]),
        *((batch, n_time, 32, 8, 128) for batch, n_time in [(8, 2048), (4, 4096), (2, 8192), (1, 16384)]),
    ],
    inputs=attention_inputs,
    work=attention_work,
    functions={
        "nanocria": kernels.flash_attention,
        "eager": eager_attention,
        "sdpa_flash": partial(sdpa, torch.nn.attention.SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": partial(sdpa, torch.nn.attention.SDPBackend.CUDNN_ATTENTION),
        "fa4": lambda q, k, v: fa4.flash_attn_func(q, k, v, causal=True)[0],
    },
    reference=reference.flash_attention,
    checked=lambda size: (1, min(size[1], 1024), *size[2:]),
)

# --- In-place updates, and NF4 dequantization. No gradients. ---


UPDATE = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SCALARS = 1.0, 1e-3, 10.0, 20.0**0.5  # the first step's: scale, lr, 1 / (1 - beta1), 1 / sqrt(1 - beta2)


def adamw_inputs(size, options):
    """A parameter, its gradient, the lower half of its master; moments, step_scalars."""
    parameter = torch.randn(size, **options)
    grad = 1e-3 * torch.randn(size, **options)
    low = torch.zeros(size, dtype=torch.int16, device=options["device"])
    moments = [torch.zeros(size, device=options["device"]) for _ in range(2)]
    return [], (parameter, grad, low, *moments, torch.tensor(SCALARS, device=options["device"]))


def adamw8bit_inputs(size, options):
    _, (*first, m, v, scalars) = adamw_inputs(size, options)
    return [], (*first, m.byte(), v.byte(), *(m.new_zeros(-(-m.numel() // 256)) for _ in range(2)), scalars)


def updated(update):
    """An in-place update as a function that returns the updated parameter."""

    def step(parameter, grad, low, *state):
        update(parameter, grad, low if parameter.dtype == torch.bfloat16 else parameter, *state, **UPDATE)
        return parameter

    return step


def adamw_from_zero(parameter, grad, low, *state):
    """The first step of a float64 parameter, whose moments are 0."""
    moments = [torch.zeros_like(parameter) for _ in range(2)]
    return updated(reference.adamw)(parameter, grad, low, *moments, state[-1])


@functools.cache
def bnb_maps(device):
    signed, unsigned = (bnb.create_dynamic_map(signed=signed).to(device) for signed in (True, False))
    return signed, unsigned, bnb.get_4bit_type("nf4", device=device)


def bnb_adamw8bit(parameter, grad, low, m, v, m_absmax, v_absmax, scalars):
    signed, unsigned, _ = bnb_maps(parameter.device)
    options = UPDATE | {"beta3": 0.0, "alpha": 0.0, "step": 1, "lr": 1e-3}
    quantization = {"qmap1": signed, "qmap2": unsigned, "absmax1": m_absmax, "absmax2": v_absmax}
    bnb.optimizer_update_8bit_blockwise("adam", grad, parameter, m, v, **options, **quantization)
    return parameter


def bnb_nf4(codes, scale_codes, scale_absmax, offset):
    signed, _, code = bnb_maps(codes.device)
    scales = bnb.QuantState(scale_absmax, code=signed, blocksize=256, dtype=torch.float32)
    shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
    state = bnb.QuantState(scale_codes, shape, code, 64, "nf4", torch.bfloat16, offset, scales)
    return bnb.dequantize_4bit(codes.view(-1, 1), state)


def adamw(kernel, eager, inputs, n_bytes, **others):
    """An update of n parameters, which moves n_bytes of each."""
    return Operation(
        dims="n",
        sizes=[(2**24,), (2**27,)],
        inputs=inputs,
        work=lambda size: {"forward": {"bytes": n_bytes * size[0]}},
        functions={"nanocria": updated(kernel), "eager": updated(eager), **others},
        reference=adamw_from_zero,
        checked=lambda size: (min(size[0], 2**20),),
    )


OPERATIONS["adamw"] = adamw(kernels.adamw, reference.adamw, adamw_inputs, 26)
OPERATIONS["adamw8bit"] = adamw(
    kernels.adamw8bit, reference.adamw8bit, adamw8bit_inputs, 14, bitsandbytes=bnb_adamw8bit
)

OPERATIONS["nf4"] = Operation(
    dims="O C",
    sizes=[(6144, 4096), (28672, 4096), (4096, 14336)],  # of Llama 3.1 8B: q, k and v; gate and up; down
    inputs=lambda size, options: ([], tuple(kernels.quantize_nf4(0.02 * torch.randn(size, **options)))),
    work=lambda size: {"forward": {"bytes": round(math.prod(size) * (2 + 0.5 + 1 / 64))}},
    functions={
        "nanocria": lambda *parts: kernels.dequantize_nf4(kernels.NF4(*parts)),
        "eager": lambda *parts: reference.dequantize_nf4(kernels.NF4(*parts)),
        "bitsandbytes": bnb_nf4,
    },
    reference=lambda codes, scale_codes, scale_absmax, offset: reference.dequantize_nf4(
        kernels.NF4(codes, scale_codes, scale_absmax.float(), offset.float()),
        torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=torch.float32, device=codes.device)),
)  # fmt: skip
