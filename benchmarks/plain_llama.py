"""Llama 3 as commonly written without custom kernels: the model of torchtitan's recipe (trainers.py).

The weights have torchtitan's names, which are Meta's.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import LlamaConfig

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class PlainAttention(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.n_rep = c.n_head // c.n_kv_head
        self.wq = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.wk = nn.Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=False)
        self.wv = nn.Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=False)
        self.wo = nn.Linear(c.n_embd, c.n_embd, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))  # (B, T, heads, D)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        # K and V repeated for each query head, as in torchtitan: (B, T, H, D)
        k, v = (x.repeat_interleave(self.n_rep, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
        with sdpa_kernel(BACKENDS, set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotate(x, cos, sin):
    """RoPE of x (B, T, heads, D) by halves, in fp32; cos and sin (T, D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    cos = cos[:, None]
    sin = sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class PlainMLP(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(c.n_embd, c.ffn_dim, bias=False)
        self.w2 = nn.Linear(c.ffn_dim, c.n_embd, bias=False)
        self.w3 = nn.Linear(c.n_embd, c.ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PlainBlock(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        self.attention = PlainAttention(c)
        self.ffn_norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        self.feed_forward = PlainMLP(c)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class PlainLlama(nn.Module):
    """Tokens (B, T) to logits (B, T, V)."""

    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.config = c
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.n_embd)
        self.layers = nn.ModuleList(PlainBlock(c) for _ in range(c.n_layer))
        self.norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        self.output = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.tie()

    def tie(self):
        if self.config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)  # (B, T, C)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))
