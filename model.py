"""Llama 3 in one file: the model of Llama 3, 3.1 and 3.2 (text), as published.

    model = Llama(LlamaConfig(n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, ffn_dim=8192, vocab_size=128256,
                              block_size=2048, tie_embeddings=True))
    model.init_weights(seed=1337)
    loss = model(tokens, targets)     # both (B, T) int64 -> fp32 scalar; holds at most 1 GiB of logits
    loss = model(tokens, targets, document_starts(tokens, first_token))  # attention stays within each document
    logits = model(tokens)            # (B, T, V)

Differences from GPT-2: positions are rotations of queries and keys (RoPE) instead of a learned table; RMSNorm instead
of LayerNorm; a gated MLP (SwiGLU); several query heads share one key/value head (grouped-query attention); no biases,
no dropout. Grattafiori et al., The Llama 3 Herd of Models, 2024. https://arxiv.org/abs/2407.21783

Shapes, here and in every comment: B batch, T time, C n_embd, H query heads, K key/value heads, D head size,
F ffn_dim, V vocabulary, N = B·T tokens.
"""

import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import kernels
import kernels.reference
from kernels.flash_attention import HEAD_SIZES

# config.json's model_type. Rename it when you change what this file computes, say SiLU to GELU: other software then
# refuses the weights, instead of computing something else with them. (New weights: OWN in runtime/hf_names.py.)
MODEL_TYPE = "llama"
TRITON_TOKENS = 4096  # longest sequence at which our attention (heads of 64, Hopper) is no slower than cuDNN's
ROPE_SCALING_KEYS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


@dataclass(frozen=True)
class LlamaConfig:
    """What a published config.json sets, by our names. How the model is executed is set separately: set_operations of
    Llama, use_fp8 of kernels/fp8_linear.py, add_lora of lora.py, recompute of runtime/recompute.py.
    """

    n_layer: int
    n_head: int
    n_kv_head: int  # n_head / n_kv_head query heads read each key/value head
    n_embd: int
    ffn_dim: int
    vocab_size: int
    block_size: int  # maximum sequence length
    rope_theta: float = 500000.0
    rope_scaling: dict | None = None  # for 3.1 and 3.2; its keys: ROPE_SCALING_KEYS
    norm_eps: float = 1e-5
    tie_embeddings: bool = False  # True for 1B and 3B: the head shares the embedding's weight

    def __post_init__(self):
        if min(self.n_layer, self.n_head, self.n_kv_head, self.n_embd, self.ffn_dim, self.vocab_size) < 1:
            raise ValueError("n_layer, n_head, n_kv_head, n_embd, ffn_dim and vocab_size must be at least 1")
        if not (0 < self.norm_eps < math.inf and 0 < self.rope_theta < math.inf):
            raise ValueError(f"norm_eps {self.norm_eps} and rope_theta {self.rope_theta} must be above 0, and finite")
        if self.n_embd % self.n_head or (self.n_embd // self.n_head) % 2:
            raise ValueError(f"n_embd {self.n_embd} must be n_head {self.n_head} times an even head size")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}")
        if self.rope_scaling is not None:
            check_rope_scaling(self.rope_scaling)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def check_rope_scaling(scaling: dict):
    if set(scaling) != ROPE_SCALING_KEYS:
        raise ValueError(f"rope_scaling has {sorted(map(str, scaling))}, expected {sorted(ROPE_SCALING_KEYS)}")
    if not all(isinstance(value, int | float) and 0 < value < math.inf for value in scaling.values()):
        raise ValueError(f"rope_scaling {scaling}: its values must be numbers above 0, and finite")
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError(f"rope_scaling {scaling}: low_freq_factor must be below high_freq_factor")


def rope_tables(config: LlamaConfig, start: int, end: int, device, dtype=torch.float32):
    """cos and sin (end - start, D/2) of the angles at positions start..end-1, computed in fp64 and rounded once.

    The llama3 scaling (3.1, 3.2) slows rotations down for contexts beyond the original one: wavelengths longer than
    original / low_freq_factor by the whole factor, those shorter than original / high_freq_factor not at all, and those
    in between by a blend. Recomputed in each forward (10 tiny launches, 20 with the scaling) instead of kept as a
    buffer: `model.to(bfloat16)` would round a buffer, and a model built on the meta device would lose it.
    """
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents  # (D/2,) radians per position
    if config.rope_scaling is not None:
        s = config.rope_scaling
        # full turns within the original context
        turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
        frequencies = keep * frequencies + (1 - keep) * frequencies / s["factor"]
    angles = torch.outer(torch.arange(start, end, device=device, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def document_starts(tokens: torch.Tensor, first_token: int) -> torch.Tensor:
    """For each token of tokens (B, T), the position where its document starts: (B, T) int32.

    This is the position of the last first_token at or before it, or 0. first_token is the data's bos. Data without one
    uses end_of_text: as an input, it belongs to the next document, whose first token it predicts (sample.py generates
    after one); as a target, it ends its own document.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(tokens == first_token, positions, 0).cummax(dim=1).values.int()


def triton_suits(head_dim: int, n_time: int, dtype: torch.dtype) -> bool:
    """True if kernels/flash_attention.py is the better choice on Hopper: heads of 64, up to 4,096 tokens, 16 bits.

    In this range forward and backward are no slower than cuDNN's, and repeat bit for bit. At 8,192 tokens cuDNN takes
    as long, at 32,768 5% less (`bench.py kernels` times both).
    """
    return head_dim == 64 and n_time <= TRITON_TOKENS and dtype in (torch.bfloat16, torch.float16)


def triton_is_faster(q):
    """True if attention='auto' picks kernels/flash_attention.py for queries q (B, T, H, D)."""
    suits = q.is_cuda and triton_suits(q.shape[3], q.shape[1], q.dtype)
    return suits and torch.cuda.get_device_capability(q.device)[0] == 9


def attend(q, k, v):
    """Causal softmax(q kᵀ / sqrt(D)) v for q (B, T, H, D), k and v (B, S, K, D) of any strides; returns (B, T, H·D).
    The T queries are the last T of the S positions.

    PyTorch tries flash first; on Hopper and later cuDNN is about 1.5 times as fast, forward and backward.
    """
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    gqa = q.shape[2] != k.shape[2]  # query heads share K and V in place: nothing is expanded
    if q.is_cuda:
        capability = torch.cuda.get_device_capability(q.device)[0]
        backends.insert(0 if capability >= 9 else 1, SDPBackend.CUDNN_ATTENTION)
        if gqa and (capability < 8 or q.dtype not in (torch.bfloat16, torch.float16)):
            # Flash and cuDNN do not support these, and the efficient kernel has no GQA: expand K and V, rather than
            # fall back to a kernel that holds (T, S) scores.
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
            gqa = False
    mask = causal_lower_right(q.shape[1], k.shape[1]) if q.shape[1] < k.shape[1] else None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D) and (B, K, S, D)
    with sdpa_kernel(backends, set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)
    return y.transpose(1, 2).flatten(2)  # (B, T, H·D), the layout flash and cuDNN write anyway


class KVCache(NamedTuple):
    """One layer's keys and values, for generation: row b holds those of its first lengths[b] positions. Prompts fill
    it, then tokens are added one by one. runtime/generate.py allocates it and keeps the lengths.
    """

    k: torch.Tensor  # (B, S, K, D)
    v: torch.Tensor
    lengths: torch.Tensor  # (B,) int64, shared by all layers; on the device, where a CUDA graph can read it
    cos: torch.Tensor  # (S, D/2) from rope_tables, also shared: recomputing one token's would take 20 launches
    sin: torch.Tensor


class Part(nn.Module):
    """A module whose operations are the kernels or their plain PyTorch references."""

    fused_kernels = True  # Llama.set_operations

    @property
    def ops(self):
        return kernels if self.fused_kernels else kernels.reference


class RMSNorm(Part):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(config.n_embd)), config.norm_eps

    def forward(self, x, branch=None, overwrite_dy=False):
        """norm(x + branch), or norm(x) if branch is None: (B, T, C). Only the final norm is called like this; a block's
        norms pass weight and eps to the fused functions that norm and project.

        overwrite_dy: backward may overwrite its incoming gradient.
        """
        if branch is None:
            return self.ops.rms_norm(x, self.weight, self.eps, overwrite_dy)
        return self.ops.add_rms_norm(x, branch, self.weight, self.eps, overwrite_dy)[0]


class Attention(Part):
    attention = "auto"  # Llama.set_operations

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        n_heads = config.n_head + 2 * config.n_kv_head  # q, k and v in one matrix
        self.qkv_proj = kernels.Linear(config.n_embd, n_heads * config.head_dim)
        self.o_proj = kernels.Linear(config.n_embd, config.n_embd)

    def forward(self, x, branch, norm, cos, sin, doc_starts=None, cache=None):
        """attn(norm(x + branch)), and x + branch: both (B, T, C)."""
        # One function instead of three modules, so that neither the norm's output nor the branch is kept for backward.
        qkv, x = self.ops.rms_norm_linear(x, branch, norm.weight, norm.eps, self.qkv_proj)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2K, D)
        q, k, v = self.ops.rope(qkv, cos, sin, self.n_head)
        n_time = q.shape[1]
        if cache is not None and n_time > 1:  # a prompt or its continuation; hidden() has cut the cache to end with it
            cache.k[:, -n_time:], cache.v[:, -n_time:] = k, v
            k, v = cache.k, cache.v
        in_triton = self.attention == "triton" or (self.attention == "auto" and triton_is_faster(q))
        if cache is not None and n_time == 1:
            y = self.ops.decode_attention(q, k, v, cache.k, cache.v, cache.lengths).flatten(2)  # also caches k and v
        elif (in_triton and n_time == k.shape[1]) or doc_starts is not None:  # PyTorch's takes no doc_starts
            y = kernels.flash_attention(q, k, v, doc_starts).flatten(2)  # (B, T, H·D)
        else:
            y = attend(q, k, v)
        return self.ops.linear(y, self.o_proj), x


class MLP(Part):
    keep_gate_up = True  # False: backward recomputes gate and up (runtime/recompute.py)

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_up_proj = kernels.Linear(config.n_embd, 2 * config.ffn_dim)
        self.down_proj = kernels.Linear(config.ffn_dim, config.n_embd)

    def chunks(self, n_tokens: int) -> int:
        """Number of token slices in which to compute (and recompute) gate and up; set by runtime/recompute.py."""
        return 1

    def forward(self, x, branch, norm, need_y=True):
        """mlp(norm(x + branch)), and x + branch: both (B, T, C)."""
        chunks = self.chunks(x.shape[:-1].numel())
        return self.ops.swiglu_mlp(  # norm, C -> 2F, silu(gate) * up, F -> C
            x, branch, norm.weight, norm.eps, self.gate_up_proj, self.down_proj,
            self.keep_gate_up and chunks == 1, need_y, chunks,
        )  # fmt: skip


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attn_norm = RMSNorm(config)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config)

    def forward(self, x, branch, cos, sin, doc_starts=None, cache=None, need_y=True):
        """Takes and returns the residual stream x and the branch not yet added to it, both (B, T, C); the first layer's
        branch is None. The next norm adds them, since it reads the sum anyway.

        need_y=False: forward is rerun for backward, which does not read the branch; it is returned uninitialised.
        """
        # x = x + branch; branch = attn(attn_norm(x))
        # x = x + branch; branch = mlp(mlp_norm(x))
        branch, x = self.attn(x, branch, self.attn_norm, cos, sin, doc_starts, cache)
        branch, x = self.mlp(x, branch, self.mlp_norm, need_y)
        return x, branch


class Head(nn.Linear):
    """C -> V, and the loss. It is computed here because FSDP gathers a weight only when its module is called."""

    fused_loss = True  # Llama.set_operations

    def __init__(self, config: LlamaConfig):
        super().__init__(config.n_embd, config.vocab_size, bias=False)

    def loss_options(self, n_tokens: int, dtype: torch.dtype) -> dict:
        """Non-default options of linear_cross_entropy; runtime/recompute.py uses it to set how the loss is computed.

        Options that change the loss itself (z_loss, label_smoothing) belong in forward, in both of its calls, and only
        if torch.is_grad_enabled(): train.py's evaluate() also calls it.
        """
        return {}

    def forward(self, x, targets=None, overwrite_x=False):
        """Logits (B, T, V) of x (B, T, C), or with targets (B, T) the mean cross-entropy, an fp32 scalar.

        overwrite_x: the loss may write x's gradient over x: only if nothing reads x afterwards.
        """
        if targets is None:
            return super().forward(x)
        x, targets = x.flatten(0, 1), targets.flatten()
        if not self.fused_loss:
            return kernels.reference.linear_cross_entropy(x, self.weight, targets)
        options = self.loss_options(x.shape[0], x.dtype)
        return kernels.linear_cross_entropy(x, self.weight, targets, overwrite_x=overwrite_x, **options)


@torch.no_grad()
def fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Writes a whole weight into a parameter; if that is sharded, each rank writes its own part."""
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter, whole = parameter.to_local(), whole.to_local()
    parameter.copy_(whole)


class Llama(Part):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config)
        self.lm_head = Head(config)
        if config.tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def set_operations(self, fused_kernels: bool = True, fused_loss: bool = True, attention: str = "auto"):
        """Selects how the same function is computed.

        fused_kernels=False: norms, RoPE, MLP in plain PyTorch; fused_loss=False: the loss, with all logits in memory.
        attention: 'triton' is kernels/flash_attention.py, 'sdpa' PyTorch's, 'auto' the faster one. ValueError for any
        other, and for 'triton' with an unsupported head size.
        """
        if attention not in ("auto", "sdpa", "triton"):
            raise ValueError(f"attention {attention!r}: must be auto, sdpa or triton")
        if attention == "triton" and self.config.head_dim not in HEAD_SIZES:
            raise ValueError(f"attention 'triton' supports head sizes 16, 32, 64 and 128, not {self.config.head_dim}")
        for module in self.modules():
            module.fused_kernels, module.fused_loss, module.attention = fused_kernels, fused_loss, attention

    def to_empty(self, **kwargs):
        """nn.Module.to_empty, but a tied head stays tied."""
        super().to_empty(**kwargs)
        if self.config.tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight
        return self

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, doc_starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits (B, T, V) in the weights' dtype, or with targets the mean cross-entropy, an fp32 scalar.

        tokens and targets (B, T) integers; a target of -100 is ignored. doc_starts (B, T) integers: the position where
        each token's document starts (document_starts): the token sees nothing before it; None: it sees all earlier
        tokens. Any starts that never decrease along T work: max(start, t - W + 1) makes a sliding window, which
        generation does not support. The loss and backward may overwrite the head's input and its gradient: a hook must
        clone what it keeps of them. ValueError if T exceeds block_size, and for doc_starts with an unsupported head
        size.
        """
        x = self.hidden(tokens, doc_starts, overwrite_dy=True)  # only one head reads it; with two, drop both overwrites
        overwrite_x = self.fused_kernels  # the fused final norm does not read its output again in backward
        return self.lm_head(x, targets, overwrite_x)

    def hidden(self, tokens, doc_starts=None, caches=None, overwrite_dy=False):
        """The head's input, (B, T, C): the normed sum of all blocks. For a second head or another loss:

            x = model.hidden(tokens)
            loss = model.lm_head(x, targets) + (value_head(x) - values).square().mean()

        overwrite_dy: as for RMSNorm, if only one function reads x. With FSDP, call this from forward, which gathers the
        weights. caches: one KVCache per layer, extended by T tokens; T > 1 only if all rows hold equally many.
        """
        _, n_time = tokens.shape  # (B, T)
        if n_time > self.config.block_size:
            raise ValueError(f"{n_time} positions, but block_size is {self.config.block_size}")
        if caches and doc_starts is not None:
            raise ValueError("doc_starts with caches: generation treats each row as one document")
        if caches and n_time > 1:
            held, n_positions = caches[0].lengths.tolist(), caches[0].k.shape[1]
            end = held[0] + n_time
            if len(set(held)) > 1 or end > n_positions:
                raise ValueError(f"{n_time} tokens per row do not fit after {held} in caches of {n_positions}")
            caches = [cache._replace(k=cache.k[:, :end], v=cache.v[:, :end]) for cache in caches]
        x, branch = self.tok_embeddings(tokens), None  # (B, T, C)
        if caches:
            positions = caches[0].lengths[:, None] + torch.arange(n_time, device=tokens.device)  # (B, T)
            cos, sin = caches[0].cos[positions], caches[0].sin[positions]
        else:
            # The kernels rotate q and k in fp32, so the tables stay fp32 even with bf16 weights.
            wide = torch.promote_types(x.dtype, torch.float32)
            cos, sin = rope_tables(self.config, 0, n_time, tokens.device, wide)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, branch = layer(x, branch, cos, sin, doc_starts, cache)
        return self.norm(x, branch, overwrite_dy)

    @torch.no_grad()
    def init_weights(self, seed: int, device: str | torch.device | None = None):
        """Norms 1, matrices normal with std 0.02, the two that write into the residual stream 0.02 / sqrt(2·n_layer).
        An adapter's A is uniform within ±1/√C, its B zero. Frozen weights are left alone: they are read later.

        Each parameter draws from its own generator, seeded by its name: so a model sharded over any number of ranks
        starts from the same weights, and no rank ever holds more than one whole parameter. device: where to draw the
        numbers (a GPU draws different ones); None: the parameter's. NotImplementedError for anything else: a bias or a
        buffer. Buffers are uninitialised after to_empty and are not saved, so compute such values in forward.
        """
        for name, _ in self.named_buffers():
            raise NotImplementedError(f"init_weights of model.py does not know how to initialise the buffer {name}")
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            if name.endswith(("norm.weight", "lora_b")):
                parameter.fill_(float(name.endswith("norm.weight")))
                continue
            if parameter.ndim == 1:
                raise NotImplementedError(f"init_weights of model.py does not know how to initialise {name}")
            writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * self.config.n_layer) if writes_residual else 0.02
            generator = torch.Generator(device or parameter.device).manual_seed(seed + zlib.crc32(name.encode()))
            whole = torch.empty(parameter.shape, device=generator.device, dtype=torch.float32)
            if name.endswith("lora_a"):
                bound = parameter.shape[1] ** -0.5
                whole.uniform_(-bound, bound, generator=generator)
            else:
                whole.normal_(0.0, std, generator=generator)
            fill(parameter, whole)

    def n_params(self) -> int:
        """Number of parameters: a tied head and its embedding once, frozen weights as the elements they represent."""
        frozen = [m for m in self.layers.modules() if isinstance(m, kernels.LoRALinear)]
        more = sum(m.in_features * m.out_features - sum(t.numel() for t in m.tensors()[:-2]) for m in frozen)
        return sum(parameter.numel() for parameter in self.parameters()) + more

    def flops_per_token(self, n_time: int) -> int:
        """FLOPs of forward and backward for one token of a sequence of n_time, without recomputation.

        6 for each weight of a matmul, 4 for a frozen one (the embedding is a lookup, the head a matmul), and for
        attention 2 matmuls of 2·C·T, forward once and backward twice, half of it masked away: 6·C·T per layer (PaLM,
        appendix B, causal). With mask_documents attention computes less; that is not subtracted.
        """
        c = self.config
        blocks = sum(module.flops() for module in self.layers.modules() if isinstance(module, kernels.Linear))
        head = (6 if self.lm_head.weight.requires_grad else 4) * c.n_embd * c.vocab_size
        return blocks + head + 6 * c.n_layer * c.n_embd * n_time
