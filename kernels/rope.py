"""Rotary position embedding of queries and keys, both in one launch.

Each head's first half and second half form D/2 pairs (Hugging Face's layout; Meta's checkpoints interleave the
pairs instead). The pair at position t turns by the angle whose cosine and sine are given:

    forward    y₁ = x₁·cos − x₂·sin        y₂ = x₂·cos + x₁·sin
    backward   dx₁ = dy₁·cos + dy₂·sin     dx₂ = dy₂·cos − dy₁·sin      (the inverse rotation: sin changes sign)

A rotation is its own bookkeeping: backward needs cos and sin, nothing of q or k.
Bytes for N tokens in 2-byte elements: 4·N·(H+K)·D each way (read and write q and k), plus 4·N·D of cos and sin.
q and k are read where the packed qkv projection left them, through their strides, and written packed.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021. https://arxiv.org/abs/2104.09864
"""

import torch

from .launch import refuse_double_backward, tl, to_compute, triton, use_triton


def rope_reference(q, k, cos, sin):
    cos, sin = cos[..., None, :], sin[..., None, :]  # (T, 1, D/2) or (B, T, 1, D/2): one angle for all heads

    def rotate(x):
        x1, x2 = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


@triton.jit
def _rotate_heads(
    x_ptr, x_batch_stride, x_time_stride, x_head_stride, x_dim_stride,
    y_ptr, batch, time, token, cos, sin,
    N_HEAD: tl.constexpr, HALF: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of one token: two tiles (heads, D/2), turned against each other."""
    heads = tl.arange(0, HEAD_BLOCK).to(tl.int64)[:, None]
    dims = tl.arange(0, HALF_BLOCK).to(tl.int64)[None, :]
    mask = (heads < N_HEAD) & (dims < HALF)
    x_ptrs = x_ptr + batch * x_batch_stride + time * x_time_stride + heads * x_head_stride
    x1 = to_compute(tl.load(x_ptrs + dims * x_dim_stride, mask=mask, other=0.0))
    x2 = to_compute(tl.load(x_ptrs + (dims + HALF) * x_dim_stride, mask=mask, other=0.0))
    y_ptrs = y_ptr + (token * N_HEAD + heads) * (2 * HALF) + dims
    tl.store(y_ptrs, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptrs + HALF, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr, q_batch_stride, q_time_stride, q_head_stride, q_dim_stride, q_out_ptr,
    k_ptr, k_batch_stride, k_time_stride, k_head_stride, k_dim_stride, k_out_ptr,
    cos_ptr, cos_batch_stride, cos_time_stride, cos_dim_stride,
    sin_ptr, sin_batch_stride, sin_time_stride, sin_dim_stride,
    n_time,
    BACKWARD: tl.constexpr, ROTATE_Q: tl.constexpr, ROTATE_K: tl.constexpr,
    N_HEAD: tl.constexpr, N_KV_HEAD: tl.constexpr, HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, KV_HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, one token: its cos and sin are loaded once for all H + K heads."""
    token = tl.program_id(0).to(tl.int64)
    batch, time = token // n_time, token % n_time
    dims = tl.arange(0, HALF_BLOCK).to(tl.int64)[None, :]
    cos_ptrs = cos_ptr + batch * cos_batch_stride + time * cos_time_stride + dims * cos_dim_stride
    sin_ptrs = sin_ptr + batch * sin_batch_stride + time * sin_time_stride + dims * sin_dim_stride
    cos = to_compute(tl.load(cos_ptrs, mask=dims < HALF, other=0.0))
    sin = to_compute(tl.load(sin_ptrs, mask=dims < HALF, other=0.0))
    if BACKWARD:
        sin = -sin
    if ROTATE_Q:
        _rotate_heads(
            q_ptr, q_batch_stride, q_time_stride, q_head_stride, q_dim_stride, q_out_ptr,
            batch, time, token, cos, sin, N_HEAD, HALF, HEAD_BLOCK, HALF_BLOCK,
        )  # fmt: skip
    if ROTATE_K:
        _rotate_heads(
            k_ptr, k_batch_stride, k_time_stride, k_head_stride, k_dim_stride, k_out_ptr,
            batch, time, token, cos, sin, N_KV_HEAD, HALF, KV_HEAD_BLOCK, HALF_BLOCK,
        )  # fmt: skip


def _rotate(q, k, cos, sin, backward, rotate_q=True, rotate_k=True):
    """Both rotated, packed (B, T, heads, D); a tensor whose rotation nobody needs stays unread, and None returns."""
    n_batch, n_time, n_head, head_dim = q.shape
    n_kv_head = k.shape[2]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if rotate_q else q
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if rotate_k else k
    cos, sin = (table.expand(n_batch, n_time, head_dim // 2) for table in (cos, sin))  # (T, D/2): batch stride 0
    _rope_kernel[(n_batch * n_time,)](
        q, *q.stride(), q_out,
        k, *k.stride(), k_out,
        cos, *cos.stride(), sin, *sin.stride(), n_time,
        BACKWARD=backward, ROTATE_Q=rotate_q, ROTATE_K=rotate_k,
        N_HEAD=n_head, N_KV_HEAD=n_kv_head, HALF=head_dim // 2,
        HEAD_BLOCK=triton.next_power_of_2(n_head), KV_HEAD_BLOCK=triton.next_power_of_2(n_kv_head),
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
    )  # fmt: skip
    return q_out if rotate_q else None, k_out if rotate_k else None


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin, backward=False)

    @staticmethod
    def backward(ctx, dq, dk):
        refuse_double_backward()
        need_dq, need_dk, _, _ = ctx.needs_input_grad
        return *_rotate(dq, dk, *ctx.saved_tensors, backward=True, rotate_q=need_dq, rotate_k=need_dk), None, None


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns each pair (x[i], x[i + D/2]) of every query and key head by its position's angle (Su et al., 2021).

    q (B, T, H, D) and k (B, T, K, D) of one dtype and any strides; cos and sin (T, D/2) or (B, T, D/2), fp32 (or
    fp64 beside fp64), constants: no gradient flows to them. Returns the rotated q and k, contiguous, in their dtype.
    ValueError where the shapes do not fit or cos or sin ask for a gradient.
    """
    n_batch, n_time, _, head_dim = q.shape
    if head_dim % 2 or q.dtype != k.dtype or k.shape[:2] != q.shape[:2] or k.shape[3] != head_dim:
        raise ValueError(
            f"q {q.dtype} {tuple(q.shape)} and k {k.dtype} {tuple(k.shape)}: "
            "expected (B, T, H, D) and (B, T, K, D) of one dtype, D even"
        )
    tables = ((n_time, head_dim // 2), (n_batch, n_time, head_dim // 2))
    if cos.shape not in tables or sin.shape != cos.shape:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}: expected both {tables[0]} or both {tables[1]}"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rope has no gradient for cos and sin: detach them")
    return _RoPE.apply(q, k, cos, sin) if use_triton(q) else rope_reference(q, k, cos, sin)
