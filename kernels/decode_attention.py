"""Attention of one new token per row over the keys and values in its cache, to which it adds its own.

    s = q [k_cache, k]ᵀ / √D        p = exp(s − max s)        y = p [v_cache, v] / Σ p

Row b of the cache holds lengths[b] positions. lengths is in device memory, so a CUDA graph that was captured once reads
as many positions as there are now. PyTorch's attention takes lengths from the host, or a mask over the whole cache.

Only the bytes count, since each element of K and V serves GROUP multiply-adds: 2·K·D·Σ lengths elements are read, once
for all query heads that share them. One program handles one row and key/value head; if these are too few for all
multiprocessors, the positions are split, and a second kernel merges the splits (Flash-Decoding, 2023.
https://pytorch.org/blog/flash-decoding/). No backward.
"""

import torch
import torch.nn.functional as F

from .launch import compute_dtype, tl, to_compute, triton, use_triton

MOST_SPLITS = 32


def decode_attention_reference(q, k, v, k_cache, v_cache, lengths):
    n_cached = lengths.tolist()
    end = max(n_cached) + 1
    seen = None
    if min(n_cached) + 1 == end:
        k_cache[:, end - 1 : end] = k
        v_cache[:, end - 1 : end] = v
    else:
        rows = torch.arange(len(q), device=q.device)
        k_cache[rows, lengths] = k[:, 0]
        v_cache[rows, lengths] = v[:, 0]
        seen = (torch.arange(end, device=q.device) <= lengths[:, None])[:, None, None]  # (B, 1, 1, end)
    k, v = (cache[:, :end].transpose(1, 2) for cache in (k_cache, v_cache))  # (B, K, end, D)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen, enable_gqa=True).transpose(1, 2)


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, lengths_ptr, y_ptr, max_ptr, sum_ptr, n_positions,
    K: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program, one row, key/value head and split: y. With several splits, each stores y before the division by its
    sum of exponentials, that sum and its maximum; _merge_kernel divides.
    """
    row_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch = row_head // K
    kv_head = row_head % K
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    is_dim = dims < D
    tile = heads[:, None] * D + dims[None, :]  # of the query heads that share this key/value head
    is_tile = (heads < GROUP)[:, None] & is_dim[None, :]
    q = to_compute(tl.load(q_ptr + row_head * GROUP * D + tile, mask=is_tile, other=0.0)) * SCALE
    length = tl.load(lengths_ptr + batch)
    row_max = tl.full([HEADS], -1e30, q.dtype)  # not -inf: a split without positions has exp(-1e30 - max) = 0
    row_sum = tl.zeros([HEADS], q.dtype)
    y = tl.zeros([HEADS, DIMS], q.dtype)
    if split == 0:  # the new token: from registers, since its place in the cache is being written
        k_new = tl.load(k_ptr + row_head * D + dims, mask=is_dim, other=0.0)
        v_new = tl.load(v_ptr + row_head * D + dims, mask=is_dim, other=0.0)
        offsets = ((batch * n_positions + length) * K + kv_head) * D + dims
        is_inside = dims < tl.where(length < n_positions, D, 0)  # nothing is written past a full cache
        tl.store(k_cache_ptr + offsets, k_new, mask=is_inside)
        tl.store(v_cache_ptr + offsets, v_new, mask=is_inside)
        row_max = tl.sum(q * to_compute(k_new)[None, :], axis=1)
        row_sum += 1.0
        y += to_compute(v_new)[None, :]

    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * share
    for start in range(begin, tl.minimum(begin + share, length), BLOCK_N):
        time = start + tl.arange(0, BLOCK_N)
        is_seen = time < length
        offsets = ((batch * n_positions + time) * K + kv_head)[:, None] * D + dims[None, :]
        mask = is_seen[:, None] & is_dim[None, :]
        k = to_compute(tl.load(k_cache_ptr + offsets, mask=mask, other=0.0))
        v = to_compute(tl.load(v_cache_ptr + offsets, mask=mask, other=0.0))
        s = tl.sum(q[:, None, :] * k[None, :, :], axis=2)  # (HEADS, BLOCK_N)
        s = tl.where(is_seen[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, axis=1))
        p = tl.exp(s - new_max[:, None])
        shrink = tl.exp(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        y = y * shrink[:, None] + tl.sum(p[:, :, None] * v[None, :, :], axis=1)
        row_max = new_max

    if SPLITS == 1:
        y_ptr += row_head * GROUP * D
        tl.store(y_ptr + tile, (y / row_sum[:, None]).to(y_ptr.dtype.element_ty), mask=is_tile)
    else:
        part = row_head * SPLITS + split
        tl.store(y_ptr + part * GROUP * D + tile, y, mask=is_tile)
        tl.store(max_ptr + part * GROUP + heads, row_max, mask=heads < GROUP)
        tl.store(sum_ptr + part * GROUP + heads, row_sum, mask=heads < GROUP)


@triton.jit
def _merge_kernel(
    parts_ptr, max_ptr, sum_ptr, y_ptr,
    GROUP: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program, one row and query head."""
    row_head = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIMS)
    part = (row_head * SPLITS + splits) * GROUP + head
    row_max = tl.load(max_ptr + part)
    weight = tl.exp(row_max - tl.max(row_max, axis=0))
    parts = tl.load(parts_ptr + part[:, None] * D + dims[None, :], mask=(dims < D)[None, :], other=0.0)
    y = tl.sum(parts * weight[:, None], axis=0) / tl.sum(tl.load(sum_ptr + part) * weight, axis=0)
    tl.store(y_ptr + (row_head * GROUP + head) * D + dims, y.to(y_ptr.dtype.element_ty), mask=dims < D)


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """softmax(q kᵀ / √D) v of one new token per row, (B, 1, H, D); stores its k and v at position lengths[b] of row b.

    q (B, 1, H, D), k and v (B, 1, K, D), k_cache and v_cache (B, S, K, D), contiguous, all of one dtype; lengths (B,)
    int64, below S: how many positions row b of the caches holds; not changed here. No gradient.
    """
    n_batch, n_positions, n_kv_head, head_dim = k_cache.shape
    n_head = q.shape[2]
    assert q.shape == (n_batch, 1, n_head, head_dim) and n_head % n_kv_head == 0, (q.shape, k_cache.shape)
    assert k.shape == v.shape == (n_batch, 1, n_kv_head, head_dim), (k.shape, v.shape, k_cache.shape)
    assert k_cache.shape == v_cache.shape and k_cache.is_contiguous() and v_cache.is_contiguous(), v_cache.shape
    assert lengths.shape == (n_batch,), lengths.shape
    assert not (torch.is_grad_enabled() and q.requires_grad), "decode_attention has no backward"
    if not use_triton(q):
        return decode_attention_reference(q, k, v, k_cache, v_cache, lengths)
    group = n_head // n_kv_head
    heads = triton.next_power_of_2(group)
    dims = triton.next_power_of_2(head_dim)
    block = max(8, min(64, 8192 // (heads * dims)))  # 8,192 products at a time: four programs per multiprocessor
    # About four programs per multiprocessor; in the interpreter, enough to test that splits add up.
    programs = 4 * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 16
    wanted = min(programs // (n_batch * n_kv_head), triton.cdiv(n_positions, block), MOST_SPLITS)
    splits = 1 << max(wanted, 1).bit_length() - 1  # rounded down to a power of two
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = y
    statistics = y, y
    if splits > 1:
        shape = (n_batch, n_kv_head, splits, group)
        parts = torch.empty(*shape, head_dim, device=q.device, dtype=compute_dtype(q))
        statistics = parts.new_empty(2, *shape).unbind()  # each split's maximum and sum
    _decode_kernel[(n_batch * n_kv_head, splits)](
        q.contiguous(), k.contiguous(), v.contiguous(), k_cache, v_cache, lengths, parts, *statistics, n_positions,
        n_kv_head, group, head_dim, head_dim**-0.5, heads, dims, block, splits, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(n_batch * n_kv_head, group)](parts, *statistics, y, group, head_dim, dims, splits, num_warps=4)
    return y
