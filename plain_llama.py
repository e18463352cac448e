"""Llama 3 in plain PyTorch, every line the mathematics: read this first, then model.py, the same model on the kernels.

    model = PlainLlama(LlamaConfig(n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, ffn_dim=8192, vocab_size=128256,
                                   block_size=2048))
    logits = model(tokens)             # tokens (B, T) -> (B, T, V)
    loss = model(tokens, targets)      # targets (B, T), -100 to ignore one -> the mean cross-entropy (NaN of none)

Differences from GPT-2: positions are rotations of queries and keys (RoPE), RMSNorm instead of LayerNorm, a gated MLP
(SwiGLU), several query heads share a key/value head (grouped-query attention), no biases, no dropout. model.py computes
the same function: tests/test_model.py holds it to this file. It differs only in how it computes: packed matrices, one
function for a norm and the projection after it, logits in chunks, recomputation.

B batch, T time, C n_embd, H query heads, K key/value heads, D head size, F ffn_dim, V vocabulary.
"""

import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

import model
from model import LlamaConfig

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def angles(c: LlamaConfig, n_time: int, device) -> torch.Tensor:
    """How far each pair of a head's elements turns at each position, in radians: (T, D/2) float64."""
    pair = torch.arange(c.head_dim // 2, device=device, dtype=torch.float64)
    frequencies = c.rope_theta ** (-2 * pair / c.head_dim)  # radians per position: the first pair turns fastest
    if c.rope_scaling:  # Llama 3.1 and 3.2, for longer contexts
        # fewer than low turns in the original context: slowed by factor; more than high: not at all; between: a blend
        s = c.rope_scaling
        turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        smooth = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        frequencies = torch.lerp(frequencies / s["factor"], frequencies, smooth.clamp(0, 1))
    return torch.outer(torch.arange(n_time, device=device, dtype=torch.float64), frequencies)


def rotate(x, cos, sin):
    """RoPE: the pair (x[i], x[i + D/2]) of each head turns by its position's angle. x (B, T, H, D), cos (T, D/2)."""
    cos = cos[:, None]  # (T, 1, D/2): all heads turn alike
    sin = sin[:, None]
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.n_embd, c.n_head * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=False)

    def forward(self, x, cos, sin):
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, K, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = rotate(q, cos, sin).transpose(1, 2)  # (B, H, T, D)
        k = rotate(k, cos, sin).transpose(1, 2)
        v = v.transpose(1, 2)
        # softmax(q kᵀ / sqrt(D)) v over this and all earlier positions; H / K query heads share each key/value head
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.n_embd, c.ffn_dim, bias=False)
        self.up_proj = nn.Linear(c.n_embd, c.ffn_dim, bias=False)
        self.down_proj = nn.Linear(c.ffn_dim, c.n_embd, bias=False)

    def forward(self, x):
        activation = ACTIVATIONS[model.ACTIVATION]
        return self.down_proj(activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.n_embd, c.norm_eps)  # x / sqrt(mean(x²) + eps) · weight
        self.attn = Attention(c)
        self.mlp_norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.attn_norm(x), cos, sin)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class PlainLlama(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.config = c
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.n_embd)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tok_embeddings(tokens)  # (B, T, C)
        dtype = torch.promote_types(x.dtype, torch.float32)  # positions need more bits than bfloat16 has
        theta = angles(self.config, tokens.shape[1], tokens.device)
        cos = theta.cos().to(dtype)  # (T, D/2)
        sin = theta.sin().to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).to(dtype), targets.flatten())  # ignores targets of -100
