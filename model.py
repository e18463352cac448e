"""Llama 3 in one file: the model of Llama 3, 3.1 and 3.2 (text), as published. plain_llama.py is the same function in
plain PyTorch, and says how Llama differs from GPT-2: read it first.

    model = Llama(LlamaConfig(n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, ffn_dim=8192, vocab_size=128256,
                              block_size=2048, tie_embeddings=True))
    model.init_weights(seed=1337)
    loss = model(tokens, targets)     # both (B, T) int64 -> fp32 scalar; holds at most 1 GiB of logits
    loss = model(tokens, targets, document_starts(tokens, first_token))  # attention stays within each document
    logits = model(tokens)            # (B, T, V)

Shapes, here and in every comment: B batch, T time, C n_embd, H query heads, K key/value heads, D head size,
F ffn_dim, V vocabulary, N = B·T tokens.

Grattafiori et al., The Llama 3 Herd of Models, 2024. https://arxiv.org/abs/2407.21783
"""

import math
import zlib
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import kernels
import kernels.reference
from kernels.attention import attention, check_backend
from kernels.execution import Execution
from kernels.offload_activations import OffloadedActivations
from kernels.recompute import recomputed

ACTIVATION = "silu"  # of the MLP's gate; kernels/glu.py also has gelu_tanh
# config.json's model_type. Rename it when you change what this file computes: other software then refuses the weights,
# instead of computing something else with them. Another ACTIVATION, and new weights (OWN in runtime/hf.py),
# rename it by themselves.
MODEL_TYPE = "llama"
ROPE_SCALING_KEYS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


@dataclass(frozen=True)
class LlamaConfig:
    """What a published config.json sets, by our names: the function that the model computes."""

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

    @property
    def packed_rows(self) -> dict[str, tuple[int, ...]]:
        """The projections that pack several matrices, and the rows of each: q, k, v, and gate, up.

        One matmul is faster than three. Optimizers, adapters and checkpoints take the matrices apart by these rows.
        Another packed projection needs an entry here, and the names of its matrices in runtime/hf.py.
        """
        kv = self.n_kv_head * self.head_dim
        return {"qkv_proj": (self.n_embd, kv, kv), "gate_up_proj": (self.ffn_dim, self.ffn_dim)}


def check_rope_scaling(scaling: dict):
    if set(scaling) != ROPE_SCALING_KEYS:
        raise ValueError(f"rope_scaling has {sorted(map(str, scaling))}, expected {sorted(ROPE_SCALING_KEYS)}")
    if not all(isinstance(value, int | float) and 0 < value < math.inf for value in scaling.values()):
        raise ValueError(f"rope_scaling {scaling}: its values must be numbers above 0, and finite")
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError(f"rope_scaling {scaling}: low_freq_factor must be below high_freq_factor")


def rope_tables(config: LlamaConfig, start: int, end: int, device, dtype=torch.float32):
    """cos and sin (end - start, D/2) of the angles at positions start..end-1, computed in fp64 and rounded once.

    For longer contexts, 3.1 and 3.2 slow a pair by factor if it turns fewer than low_freq_factor times in the original
    context, not at all if more than high_freq_factor times; between them it is a blend. Recomputed in each forward (10
    tiny launches, 20 with the scaling) instead of kept as a buffer: `model.to(bfloat16)` would round a buffer, and a
    model built on the meta device would lose it.
    """
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents  # (D/2,) radians per position
    if config.rope_scaling is not None:
        s = config.rope_scaling
        turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        smooth = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
        frequencies = smooth * frequencies + (1 - smooth) * frequencies / s["factor"]
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


class KVCache(NamedTuple):
    """One layer's keys and values, for generation: row b holds those of its first lengths[b] positions. Prompts fill
    it, then tokens are added one by one. runtime/generate.py allocates its S positions and keeps the lengths.
    """

    k: torch.Tensor  # (B, S, K, D)
    v: torch.Tensor
    lengths: torch.Tensor  # (B,) int64, shared by all layers; on the device, where a CUDA graph can read it
    cos: torch.Tensor  # (S, D/2) from rope_tables, also shared: recomputing one token's would take 20 launches
    sin: torch.Tensor


class RMSNorm(nn.Module):
    def __init__(self, config: LlamaConfig, how: Execution):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.eps = config.norm_eps

    def forward(self, x, delta=None, overwrite_dy=False):
        """norm(x + delta), or norm(x) without delta: (B, T, C). Only the final norm is called like this: a block
        computes its norms together with the projection after them.

        overwrite_dy: backward may overwrite its incoming gradient.
        """
        if delta is None:
            return self.how.ops.rms_norm(x, self.weight, self.eps, overwrite_dy)
        return self.how.ops.add_rms_norm(x, delta, self.weight, self.eps, overwrite_dy)[0]


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, how: Execution):
        super().__init__()
        check_backend(how.attention, config.head_dim)
        self.how = how
        self.n_head = config.n_head
        self.head_dim = config.head_dim
        self.qkv_proj = kernels.Linear(config.n_embd, *config.packed_rows["qkv_proj"])
        self.o_proj = kernels.Linear(config.n_embd, config.n_embd)

    def forward(self, qkv, cos, sin, doc_starts=None, cache=None):
        """o_proj(softmax(q kᵀ / sqrt(D)) v), (B, T, C), for qkv (B, T, (H + 2K)·D): Block has projected it already."""
        ops = self.how.ops
        q, k, v = ops.rope(qkv.unflatten(-1, (-1, self.head_dim)), cos, sin, self.n_head)
        n_time = q.shape[1]
        if cache is None:
            y = attention(q, k, v, doc_starts, self.how.attention)  # (B, T, H, D)
        elif n_time == 1:
            y = ops.decode_attention(q, k, v, cache.k, cache.v, cache.lengths)  # also caches k and v
        else:  # prompts: the cache was empty
            cache.k[:, :n_time] = k
            cache.v[:, :n_time] = v
            y = attention(q, k, v, None, self.how.attention)
        return ops.linear(y.flatten(2), self.o_proj)


class MLP(nn.Module):
    """The matrices of down_proj(act(gate) · up). Block computes it, together with the norm before it."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_up_proj = kernels.Linear(config.n_embd, *config.packed_rows["gate_up_proj"])
        self.down_proj = kernels.Linear(config.ffn_dim, config.n_embd)


class Block(nn.Module):
    """One layer: attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, how: Execution):
        super().__init__()
        self.how = how
        self.attn_norm = RMSNorm(config, how)
        self.attn = Attention(config, how)
        self.mlp_norm = RMSNorm(config, how)
        self.mlp = MLP(config)

    def forward(self, x, delta, cos, sin, doc_starts=None, cache=None, offload=None):
        """x (B, T, C): the residual stream. delta (B, T, C): the last sublayer's output, which the next norm adds to x
        in the same kernel; None in the first layer and after a layer of recompute(). Returns both.

        offload: a context in which what the layer keeps for backward moves to the CPU, given this layer's tensors.
        """
        full = self.how.checkpointing == "full" and cache is None
        run = self.recompute if full else self.compute
        if offload is None:
            return run(x, delta, cos, sin, doc_starts, cache)
        kept_input = x if delta is None else None  # else the layer keeps x + delta, which is not computed yet
        with offload(kept_input, (*self.parameters(), cos, sin, doc_starts)):
            return run(x, delta, cos, sin, doc_starts, cache)

    def compute(self, x, delta, cos, sin, doc_starts=None, cache=None, for_backward=False):
        """In plain PyTorch:

            x = x + attn(attn_norm(x))
            x = x + mlp(mlp_norm(x))

        for_backward: the values of the results do not matter, only their graph: delta is returned uninitialized.
        """
        ops = self.how.ops
        chunks = self.how.chunks_of_mlp(x.shape[:-1].numel(), x.shape[-1])
        # x += delta; qkv = attn_norm(x) Wᵀ. One function, so that the norm's output is not kept for backward
        qkv, x = ops.add_norm_linear(x, delta, self.attn_norm, self.attn.qkv_proj)
        delta = self.attn(qkv, cos, sin, doc_starts, cache)
        del qkv  # the MLP needs the memory
        # x += delta; delta = mlp(mlp_norm(x))
        delta, x = ops.add_norm_mlp(
            x, delta, self.mlp_norm, self.mlp.gate_up_proj, self.mlp.down_proj, ACTIVATION,
            save_gate_up=self.how.checkpointing != "selective" and chunks == 1,
            skip_down_proj=for_backward, chunks=chunks,
        )  # fmt: skip
        return x, delta

    def recompute(self, x, delta, cos, sin, doc_starts=None, cache=None):
        """compute(), keeping only the layer's input. recomputed() adds compute()'s two results: where that runs, this
        returns their sum, and None in place of delta.
        """
        if delta is not None:
            x = x + delta  # one tensor to keep instead of two
        if torch.compiler.is_compiling() or (self.how.kernels == "none" and not self.how.offload_activations):
            # PyTorch's checkpoint: the compiler drops what backward does not need, and with plain operations
            # recomputation stops at the last tensor needed. Fused functions benefit from neither.
            if not torch.is_grad_enabled():
                return self.compute(x, None, cos, sin, doc_starts)
            inputs = x, None, cos, sin, doc_starts
            return checkpoint(self.compute, *inputs, use_reentrant=False, preserve_rng_state=False)

        def of_group(x, doc_starts, for_backward):
            return self.compute(x, None, cos, sin, doc_starts, None, for_backward)

        return recomputed(self, of_group, x, doc_starts, self.how.groups_of_sequences(*x.shape)), None


class Head(nn.Linear):
    """C -> V, and the loss. It is computed here because FSDP gathers a weight only when its module is called."""

    def __init__(self, config: LlamaConfig, how: Execution):
        super().__init__(config.n_embd, config.vocab_size, bias=False)
        self.how = how

    def forward(self, x, targets=None, overwrite_x=False):
        """Logits (B, T, V) of x (B, T, C), or with targets (B, T) the mean cross-entropy, an fp32 scalar.

        overwrite_x: the loss may write x's gradient over x: only if nothing reads x afterwards.
        """
        if targets is None:
            return super().forward(x)
        x = x.flatten(0, 1)
        targets = targets.flatten()
        if self.how.kernels != "all":
            return kernels.reference.linear_cross_entropy(x, self.weight, targets)
        options = self.how.loss_options(len(x), self.out_features, x.dtype)
        return kernels.linear_cross_entropy(x, self.weight, targets, overwrite_x=overwrite_x, **options)


@torch.no_grad()
def fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Writes a whole weight into a parameter; if that is sharded, each rank writes its own part."""
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter = parameter.to_local()
        whole = whole.to_local()
    parameter.copy_(whole)


class Llama(nn.Module):
    """how: the kernels, the attention and what backward recomputes (kernels/execution.py). It changes no result but by
    rounding. ValueError for an attention that does not support the config's head size.
    """

    def __init__(self, config: LlamaConfig, how: Execution | None = None):
        super().__init__()
        self.config = config
        self.how = how or Execution()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config, self.how) for _ in range(config.n_layer))
        self.norm = RMSNorm(config, self.how)
        self.lm_head = Head(config, self.how)
        self.offloaded = OffloadedActivations(config.n_layer) if self.how.offload_activations else None
        if config.tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

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
        return self.lm_head(x, targets, overwrite_x=True)  # the final norm does not read its output again in backward

    def hidden(self, tokens, doc_starts=None, caches=None, overwrite_dy=False):
        """The head's input, (B, T, C): the normed sum of all blocks. For a second head or another loss:

            x = model.hidden(tokens)
            loss = model.lm_head(x, targets) + (value_head(x) - values).square().mean()

        overwrite_dy: as for RMSNorm, if only one function reads x. With FSDP, call this from forward, which gathers the
        weights. caches: one KVCache per layer, extended by T tokens; T > 1 only if they are empty.
        """
        _, n_time = tokens.shape  # (B, T)
        if n_time > self.config.block_size:
            raise ValueError(f"{n_time} positions, but block_size is {self.config.block_size}")
        assert not caches or doc_starts is None, "generation treats each row as one document"
        x = self.tok_embeddings(tokens)  # (B, T, C)
        delta = None
        if caches:
            positions = caches[0].lengths[:, None] + torch.arange(n_time, device=tokens.device)  # (B, T)
            cos = caches[0].cos[positions]
            sin = caches[0].sin[positions]
        else:
            # The kernels rotate q and k in fp32, so the tables stay fp32 even with bf16 weights.
            table_dtype = torch.promote_types(x.dtype, torch.float32)
            cos, sin = rope_tables(self.config, 0, n_time, tokens.device, table_dtype)
        offloads = self.offloaded is not None and torch.is_grad_enabled()
        for i, layer in enumerate(self.layers):
            cache = caches[i] if caches else None
            offload = partial(self.offloaded.layer, i) if offloads else None
            x, delta = layer(x, delta, cos, sin, doc_starts, cache, offload)
        return self.norm(x, delta, overwrite_dy)

    @torch.no_grad()
    def init_weights(self, seed: int, device: str | torch.device | None = None):
        """Norms 1, matrices normal with std 0.02, the two that write into the residual stream 0.02 / sqrt(2·n_layer).
        An adapter's A is uniform within ±1/√C, its B zero. Frozen weights are left alone: they are read later.

        Each parameter draws from its own generator, seeded by its name: so a model sharded over any number of ranks
        starts from the same weights, and no rank ever holds more than one whole parameter. device: where to draw the
        numbers (a GPU draws different ones); None: the parameter's. NotImplementedError for anything else: a bias or a
        buffer. Buffers are uninitialized after to_empty and are not saved, so compute such values in forward.
        """
        for name, _ in self.named_buffers():
            raise NotImplementedError(f"init_weights of model.py does not know how to initialize the buffer {name}")
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            if name.endswith(("norm.weight", "lora_b")):
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            if parameter.ndim == 1:
                raise NotImplementedError(f"init_weights of model.py does not know how to initialize {name}")
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
        total = sum(parameter.numel() for parameter in self.parameters())
        for module in self.layers.modules():
            if isinstance(module, kernels.LoRALinear):
                *stored, _, _ = module.tensors()  # how the frozen weight is stored; the last two are the adapter's
                total += module.in_features * module.out_features - sum(tensor.numel() for tensor in stored)
        return total

    def flops_per_token(self, n_time: int) -> int:
        """FLOPs of forward and backward for one token of a sequence of n_time, without recomputation.

        6 for each weight of a matmul, 4 for a frozen one (the embedding is a lookup, the head a matmul), and for
        attention 2 matmuls of 2·C·T, forward once and backward twice, half of it masked away: 6·C·T per layer (PaLM,
        appendix B, causal). With mask_documents attention computes less; that is not subtracted. All projections count:
        in a mixture of experts count only those that a token uses.
        """
        c = self.config
        blocks = sum(module.flops() for module in self.layers.modules() if isinstance(module, kernels.Linear))
        head = (6 if self.lm_head.weight.requires_grad else 4) * c.n_embd * c.vocab_size
        return blocks + head + 6 * c.n_layer * c.n_embd * n_time
