"""Exact causal attention that never holds the (T, T) scores; grouped heads, any number of documents per row.

    forward    s = q kᵀ / √D       lse = log Σ exp(s)        p = exp(s − lse)       y = p v
    backward   dv = pᵀ dy          delta = Σ_D dy · y        ds = p · (dy vᵀ − delta)
               dq = ds k / √D      dk = dsᵀ q / √D

Token t sees the tokens starts[t]..t, its document so far. Forward moves one block of queries along the blocks of keys
with a running maximum and a running sum; blocks that no query sees are skipped, blocks that all queries see need no
mask. Backward needs q, k, v, y and one fp32 lse per query and head, and recomputes p from them. It has two kernels: one
holds the dq of a block of queries and walks the keys, one holds the dk and dv of a block of keys and walks the queries
of all heads that share them. So every sum has one owner and one order, and a run repeats bit for bit without atomics;
the price is that both compute s and dy vᵀ, 7 matmuls instead of 5. fp32 rounds lse by up to |lse|·2⁻²⁴, which becomes a
relative error of p: with scores of 10⁴ backward keeps three digits, as in every flash attention.

FLOPs for the n = T(T+1)/2 pairs of a row and head: forward 4nD, backward 14nD. Bytes for N tokens of 2-byte elements:
forward 4N(H+K)D, backward 12N(H+K)D, negligible at a thousand FLOPs per byte. The exponentials matter: a multiprocessor
computes 16 per clock, but 4,096 FLOPs, so at D = 64 they take as long as the matmuls. They are base 2, one fused
multiply-add and one instruction each, and overlap another block's matmuls wherever two programs share the hardware.
On one H200, where a matmul of as many FLOPs (in backward, of the five that suffice) is 100%: forward 56-70%, backward
50-57%.

Made for Hopper, whose copy engine (TMA) reads the tiles. Triton emulates it on older cards, slowly.
Dao, FlashAttention-2, 2023. https://arxiv.org/abs/2307.08691
"""

import torch
import torch.nn.functional as F

from .launch import (
    A100_SHARED_MEMORY,
    HAS_TRITON,
    INTERPRETED,
    compute_dtype,
    refuse_double_backward,
    shared_memory,
    tl,
    to_compute,
    triton,
    use_triton,
)

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

HEAD_SIZES = (16, 32, 64, 128)

# BLOCK_M queries, BLOCK_N keys, warps, stages of loads in flight, registers per thread (None: no limit).
# The best of about 200 on one H200 with Triton 3.6 in bf16, 32 query heads on 8: 8 x 2048 and 2 x 8192 tokens at
# D = 64, 4 x 4096 at D = 128. In all but dq at D = 128, two to four programs share a multiprocessor, and that decides:
# Triton makes a program wait for its matmul before the exponentials, so meanwhile the tensor cores need another
# program's. (If the next block's scores are requested before this one's exponentials, Triton 3.6 copies their
# accumulators at the end of the loop before waiting for them: ptxas then serializes every matmul, warning C7514.)
# BLOCK_M is at least 32: TMA needs 128 bytes, even of lse and delta, which have one fp32 per query.
CONSTANTS = {
    "fwd": {64: (128, 128, 8, 3, 128), 128: (128, 64, 4, 2, None)},
    "dq": {64: (64, 64, 4, 2, None), 128: (128, 64, 8, 3, None)},
    "dkv": {64: (64, 64, 4, 3, 168), 128: (64, 64, 4, 2, None)},
}
# Small enough for fp32's registers, for GPUs with less shared memory, and for tests to cross several blocks.
FALLBACK = (32, 16, 4, 2, None)


def flash_attention_reference(q, k, v, starts=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D) and (B, K, T, D)
    visible = None
    if starts is not None:
        time = torch.arange(q.shape[2], device=q.device)
        visible = (starts[:, None, :, None] <= time) & (time <= time[:, None])  # (B, 1, T, T)
    y = F.scaled_dot_product_attention(q, k, v, visible, is_causal=starts is None, enable_gqa=True)
    return y.transpose(1, 2).contiguous()


@triton.jit
def _load(tiles, batch, head, time):
    """One head's tokens from time on, (BLOCK, D) or (BLOCK,). TMA loads them, with zeros for tokens past T."""
    if len(tiles.block_shape) == 4:
        return tiles.load([batch, head, time, 0]).reshape(tiles.block_shape[2], tiles.block_shape[3])
    else:
        return tiles.load([batch, head, time]).reshape(tiles.block_shape[2])


@triton.jit
def _store(tiles, batch, head, time, x):
    """Stores x where _load would read it: rounds once, drops tokens past T."""
    x = x.to(tiles.dtype).reshape(tiles.block_shape)
    if len(tiles.block_shape) == 4:
        tiles.store([batch, head, time, 0], x)
    else:
        tiles.store([batch, head, time], x)


@triton.jit
def _dot(a, b, total=None):
    """a b + total in fp32. "ieee" is for fp32 inputs: without it they would be cut to 10 bits of mantissa."""
    if total is None:
        return tl.dot(a, b, input_precision="ieee")
    else:  # out_dtype: Triton 3.7 takes a total in fp64 only if told
        return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def _keys_of(starts_ptr, batch, row0, rows, n_time, BLOCK_N: tl.constexpr):
    """For a block of queries: each one's document start (BLOCK_M,); begin and end of the keys that any of them sees;
    and the first key that all of them see (up to the diagonal).
    """
    end = tl.minimum(row0 + rows.shape[0], n_time)
    if starts_ptr is None:
        return tl.zeros_like(rows), 0, end, 0
    else:
        starts_ptr += batch.to(tl.int64) * n_time
        starts = tl.load(starts_ptr + rows, mask=rows < n_time, other=0)
        begin = tl.load(starts_ptr + row0) // BLOCK_N * BLOCK_N
        return starts, begin, end, tl.load(starts_ptr + end - 1)


@triton.jit
def _where_seen(x, otherwise, rows, cols, starts, starts_ptr):
    """x where the row's query sees the column's key, else `otherwise`."""
    seen = cols[None, :] <= rows[:, None]
    if starts_ptr is not None:
        seen &= cols[None, :] >= starts[:, None]
    return tl.where(seen, x, otherwise)


@triton.jit
def _flash_fwd_kernel(
    q_tiles, k_tiles, v_tiles, y_tiles, lse_tiles, starts_ptr, n_time,
    N_HEAD: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program, BLOCK_M queries of one head. lse is kept in base 2: log2 Σ exp2(s·log2 e)."""
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634
    batch = tl.program_id(0) // N_HEAD
    head = tl.program_id(0) % N_HEAD
    row0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # longest first, so that none starts last
    rows = row0 + tl.arange(0, BLOCK_M)
    starts, begin, end, common = _keys_of(starts_ptr, batch, row0, rows, n_time, BLOCK_N)
    q = _load(q_tiles, batch, head, row0)
    y = tl.zeros(q.shape, lse_tiles.dtype)
    # Not -inf: a query that sees none of a block gets exp(-inf - row_max) = 0 there, not NaN.
    row_max = tl.full([BLOCK_M], -1e30, y.dtype)
    row_sum = tl.zeros([BLOCK_M], y.dtype)
    for col0 in range(begin, end, BLOCK_N):
        k = _load(k_tiles, batch, head // GROUP, col0)
        s = _dot(q, k.T)
        if (col0 + BLOCK_N > row0) | (col0 < common):  # a branch: most blocks need no mask
            s = _where_seen(s, float("-inf"), rows, col0 + tl.arange(0, BLOCK_N), starts, starts_ptr)
        new_max = tl.maximum(row_max, tl.max(s, axis=1) * SCALE_LOG2)
        p = tl.exp2(s * SCALE_LOG2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        v = _load(v_tiles, batch, head // GROUP, col0)
        y = _dot(p.to(v.dtype), v, y * shrink[:, None])
        row_max = new_max
    _store(y_tiles, batch, head, row0, y / row_sum[:, None])
    _store(lse_tiles, batch, head, row0, row_max + tl.log2(row_sum))


@triton.jit
def _flash_dq_kernel(
    q_tiles, k_tiles, v_tiles, y_tiles, dy_tiles, dq_tiles, lse_tiles, delta_tiles, starts_ptr, n_time,
    N_HEAD: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program, BLOCK_M queries of one head: their delta, which the next kernel reads, then their dq."""
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634
    batch = tl.program_id(0) // N_HEAD
    head = tl.program_id(0) % N_HEAD
    row0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    dy = _load(dy_tiles, batch, head, row0)
    delta = tl.sum(to_compute(dy) * to_compute(_load(y_tiles, batch, head, row0)), axis=1)
    _store(delta_tiles, batch, head, row0, delta)
    starts, begin, end, common = _keys_of(starts_ptr, batch, row0, rows, n_time, BLOCK_N)
    q = _load(q_tiles, batch, head, row0)
    lse = _load(lse_tiles, batch, head, row0)
    dq = tl.zeros(q.shape, lse.dtype)
    for col0 in range(begin, end, BLOCK_N):
        k = _load(k_tiles, batch, head // GROUP, col0)
        v = _load(v_tiles, batch, head // GROUP, col0)
        s = _dot(q, k.T)
        dp = _dot(dy, v.T)
        p = tl.exp2(s * SCALE_LOG2 - lse[:, None])
        if (col0 + BLOCK_N > row0) | (col0 < common):
            p = _where_seen(p, 0.0, rows, col0 + tl.arange(0, BLOCK_N), starts, starts_ptr)
        ds = p * (dp - delta[:, None])
        dq = _dot(ds.to(k.dtype), k, dq)
    _store(dq_tiles, batch, head, row0, dq * SCALE)


@triton.jit
def _flash_dkv_kernel(
    q_tiles, k_tiles, v_tiles, dy_tiles, dk_tiles, dv_tiles, lse_tiles, delta_tiles, ends_ptr, n_time,
    N_HEAD: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program, BLOCK_N keys of one key/value head, the queries of all GROUP heads that share it.

    The tiles are transposed, (keys, queries): p and ds then leave one matmul in registers as the next one takes them.
    """
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634
    batch = tl.program_id(0) // (N_HEAD // GROUP)
    kv_head = tl.program_id(0) % (N_HEAD // GROUP)
    col0 = tl.program_id(1) * BLOCK_N  # the first keys have the most queries
    cols = col0 + tl.arange(0, BLOCK_N)
    end = n_time  # of the queries that see any of the keys
    common = n_time  # of the queries that see all of them
    if ends_ptr is not None:
        ends_ptr += batch.to(tl.int64) * n_time
        ends = tl.load(ends_ptr + cols, mask=cols < n_time, other=0)
        end = tl.load(ends_ptr + tl.minimum(col0 + BLOCK_N, n_time) - 1)
        common = tl.load(ends_ptr + col0)
    k = _load(k_tiles, batch, kv_head, col0)
    v = _load(v_tiles, batch, kv_head, col0)
    dk = tl.zeros(k.shape, lse_tiles.dtype)
    dv = tl.zeros(v.shape, lse_tiles.dtype)
    begin = col0 // BLOCK_M * BLOCK_M
    # One loop over all heads, so that its loads are in flight from the first head to the last. A query past T is all
    # zeros: its p is 1, but its dy, ds and q add nothing.
    for step in range(0, tl.cdiv(end - begin, BLOCK_M) * GROUP):
        head = kv_head * GROUP + step % GROUP
        row0 = begin + step // GROUP * BLOCK_M
        q = _load(q_tiles, batch, head, row0)
        dy = _load(dy_tiles, batch, head, row0)
        lse = _load(lse_tiles, batch, head, row0)
        delta = _load(delta_tiles, batch, head, row0)
        s = _dot(k, q.T)
        dp = _dot(v, dy.T)
        p = tl.exp2(s * SCALE_LOG2 - lse[None, :])
        if (row0 < col0 + BLOCK_N) | (row0 + BLOCK_M > common):
            rows = row0 + tl.arange(0, BLOCK_M)
            seen = rows[None, :] >= cols[:, None]
            if ends_ptr is not None:
                seen &= rows[None, :] < ends[:, None]
            p = tl.where(seen, p, 0.0)
        dv = _dot(p.to(dy.dtype), dy, dv)
        ds = p * (dp - delta[None, :])
        dk = _dot(ds.to(q.dtype), q, dk)
    _store(dk_tiles, batch, kv_head, col0, dk * SCALE)
    _store(dv_tiles, batch, kv_head, col0, dv)


def _readable(x):
    """x if TMA can read it (last stride 1, the others multiples of 16 bytes, 16-byte aligned), otherwise a copy."""
    if INTERPRETED and x.dtype == torch.bfloat16:
        return x.float().contiguous()  # the interpreter's tl.dot misreads bf16
    strides_fit = all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    if strides_fit and x.stride(-1) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _tiles(x, block):
    """x (B, T, heads, D) or (B, T, heads) as the kernels see it: in tiles of `block` tokens of one head."""
    return TensorDescriptor.from_tensor(x.transpose(1, 2), [1, 1, block, *x.shape[3:]])


def _blocks(kernel, q):
    fast = q.element_size() == 2 and shared_memory(q) >= A100_SHARED_MEMORY and not INTERPRETED
    block_m, block_n, warps, stages, registers = CONSTANTS[kernel][max(q.shape[-1], 64)] if fast else FALLBACK
    launch = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    return block_m, block_n, {"BLOCK_M": block_m, "BLOCK_N": block_n, "SCALE": q.shape[-1] ** -0.5, **launch}


def _one_per_query(q):
    """An uninitialized fp32 (B, T, H), fp64 for fp64, laid out (B, H, T) with each head's row padded to 16 bytes."""
    n_batch, n_time, n_head, _ = q.shape
    padded = torch.empty(n_batch, n_head, triton.cdiv(n_time, 4) * 4, dtype=compute_dtype(q), device=q.device)
    return padded[:, :, :n_time].transpose(1, 2)


# Opaque operators: torch.compile calls them as they are, and selective checkpointing policies can name them.
@torch.library.custom_op("nanocria::flash_attention", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (B, T, H, D) and lse (B, T, H)."""
    y, lse = _forward_fake(q, k, v, starts)
    if y.numel() == 0:
        return y, lse
    n_batch, n_time, n_head, _ = q.shape
    block_m, block_n, constants = _blocks("fwd", q)
    q, k, v = (_readable(x) for x in (q, k, v))
    _flash_fwd_kernel[(n_batch * n_head, triton.cdiv(n_time, block_m))](
        _tiles(q, block_m), _tiles(k, block_n), _tiles(v, block_n), _tiles(y, block_m),
        _tiles(lse, block_m), starts, n_time,
        N_HEAD=n_head, GROUP=n_head // k.shape[2], **constants,
    )  # fmt: skip
    return y, lse


@_forward.register_fake
def _forward_fake(q, k, v, starts):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), _one_per_query(q)


@torch.library.custom_op("nanocria::flash_attention_backward", mutates_args=())
def _backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    lse: torch.Tensor,
    starts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq (B, T, H, D), dk and dv (B, T, K, D)."""
    dq, dk, dv = _backward_fake(dy, q, k, v, y, lse, starts)
    if y.numel() == 0:
        return dq, dk, dv
    n_batch, n_time, n_head, _ = q.shape
    n_kv_head = k.shape[2]
    heads = {"N_HEAD": n_head, "GROUP": n_head // n_kv_head}
    delta = _one_per_query(q)
    if lse.stride() != delta.stride():  # autograd hooks such as save_on_cpu may have changed the layout
        lse = _one_per_query(q).copy_(lse)
    block_m, block_n, constants = _blocks("dq", q)
    dkv_constants = _blocks("dkv", q)
    q, k, v, y, dy = (_readable(x) for x in (q, k, v, y, dy))
    _flash_dq_kernel[(n_batch * n_head, triton.cdiv(n_time, block_m))](
        _tiles(q, block_m), _tiles(k, block_n), _tiles(v, block_n), _tiles(y, block_m), _tiles(dy, block_m),
        _tiles(dq, block_m), _tiles(lse, block_m), _tiles(delta, block_m), starts, n_time,
        **heads, **constants,
    )  # fmt: skip
    # Tokens s..ends[s] − 1 see token s: starts never decrease, so all up to the last with starts[t] <= s.
    ends = None
    if starts is not None:
        time = torch.arange(n_time, dtype=starts.dtype, device=starts.device)
        ends = torch.searchsorted(starts, time.expand(n_batch, -1).contiguous(), right=True, out_int32=True)
    block_m, block_n, constants = dkv_constants
    _flash_dkv_kernel[(n_batch * n_kv_head, triton.cdiv(n_time, block_n))](
        _tiles(q, block_m), _tiles(k, block_n), _tiles(v, block_n), _tiles(dy, block_m),
        _tiles(dk, block_n), _tiles(dv, block_n), _tiles(lse, block_m), _tiles(delta, block_m), ends, n_time,
        **heads, **constants,
    )  # fmt: skip
    return dq, dk, dv


@_backward.register_fake
def _backward_fake(dy, q, k, v, y, lse, starts):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts):
        y, lse = _forward(q, k, v, starts)
        ctx.save_for_backward(q, k, v, y, lse, starts)
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward()
        return *_backward(dy, *ctx.saved_tensors), None


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """y[t] = Σ_s softmax_s(q[t]·k[s] / √D)·v[s] over the tokens s of t's document up to t (Dao, 2023).

    q (B, T, H, D), k and v (B, T, K, D) of one floating dtype and any strides; K divides H, and query head h reads
    key/value head h // (H/K). D is a power of two from 16 to 128. starts (B, T) integers, for each token the position
    of the first token of its document (so they never decrease along T); None if each row is one document.
    Returns y (B, T, H, D) in q's dtype, contiguous. ValueError for another D. float64 on a GPU and machines without
    Triton use plain PyTorch, which may hold the (T, T) scores.
    """
    n_batch, n_time, n_head, head_dim = q.shape
    assert k.shape == v.shape == (n_batch, n_time, k.shape[2], head_dim), (q.shape, k.shape, v.shape)
    assert q.dtype == k.dtype == v.dtype and q.is_floating_point(), (q.dtype, k.dtype, v.dtype)
    assert n_head % k.shape[2] == 0, (n_head, k.shape[2])
    assert starts is None or (starts.shape == q.shape[:2] and not starts.is_floating_point()), starts.shape
    if head_dim not in HEAD_SIZES:
        raise ValueError(f"head size {head_dim}: 16, 32, 64 and 128 are supported")
    if not use_triton(q) or (q.dtype == torch.float64 and q.is_cuda):
        return flash_attention_reference(q, k, v, starts)
    return _FlashAttention.apply(q, k, v, None if starts is None else starts.int().contiguous())
