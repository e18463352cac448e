"""flash_attention.py's forward as Hopper wants it: one block's exponentials while the tensor cores compute another's.

    s = q kᵀ / √D        lse = log Σ exp(s)        y = exp(s − lse) v

Triton makes a program wait for its matmul before it computes exponentials. Gluon, Triton's lower level, lets the source
say what each warp does and when it waits:

    the producer, 1 warp         asks TMA for blocks of q, k and v, as many ahead as there are free buffers
    two consumers, 4 warps each  hold 64 queries; start q kᵀ of the next block and p v of this one, wait for q kᵀ alone,
                                 and compute the next p while p v runs

The consumers take turns to start matmuls, so that one computes exponentials while the other's matmuls run. They wait
for each other and for TMA at mbarriers, counters in shared memory: a barrier's phase ends when all that it counts have
arrived, and a wait names the parity of the phase it waits for. A buffer has two, `full` (TMA wrote it) and `empty` (all
consumers have read it).

A program per multiprocessor takes tiles of 128 queries of one head: longest first, in turn forwards and backwards, so
that all programs get about as much. It loads the next tile while it computes this one. The keys go from the diagonal,
the only block that causality masks, back to the first that any query of the tile sees.

Registers, 240 for each thread of a consumer: per block BLOCK_N/2 of s, BLOCK_N/4 of p, and D/2 of y: 160 for D = 128.
Shared memory: q of two tiles (y leaves through the same buffers) and STAGES blocks of k and of v, 256 D bytes times
2 + 2 STAGES: 192 KiB of 227 for D = 128, 160 for D = 64.
FLOPs and bytes are flash_attention.py's.

Backward is flash_attention.py's or cuDNN's, whichever is faster: both need q, k, v, y and lse alone.
Shah et al., FlashAttention-3, 2024. https://arxiv.org/abs/2407.08608
"""

import math

import torch

from .flash_attention import _backward, _forward_fake, _readable
from .launch import HAS_TRITON, INTERPRETED, refuse_double_backward, tl, triton

if HAS_TRITON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
else:
    gluon = triton
    gl = tl

STAGES = {64: 4, 128: 2}  # by head size: blocks of k, and of v, in shared memory
ROWS = 64  # queries of one consumer: the rows of one wgmma instruction
BLOCK_N = 128  # keys of a block: as many as a tile has queries, so that each tile has one block on the diagonal
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
LAUNCH_REGISTERS = 168  # what each of the 12 warps starts with, before the producer's group gives its own away
TRITON_TOKENS = 4096  # for heads of 64, flash_attention.py's backward is no slower than cuDNN's up to here


@gluon.jit
def _number_of_tiles(n_heads, n_time, TILE: gl.constexpr):
    """How many of the tiles this program takes."""
    n_tiles = n_heads * gl.cdiv(n_time, TILE)
    rounds = n_tiles // gl.num_programs(0)
    last = rounds * gl.num_programs(0) + _place(rounds)
    return rounds + (last < n_tiles).to(gl.int32)


@gluon.jit
def _place(i):
    """This program's place in the i-th round: forwards and backwards in turn."""
    backwards = gl.num_programs(0) - 1 - gl.program_id(0)
    return gl.where(i % 2 == 0, gl.program_id(0), backwards)


@gluon.jit
def _tile(i, n_heads, n_time, starts_ptr, N_HEAD: gl.constexpr, TILE: gl.constexpr, DOCUMENTS: gl.constexpr):
    """The i-th tile of this program: its batch, head and first query; its blocks of keys are `first` to `diagonal`,
    and from `common` on, all of its queries see all keys before the diagonal.
    """
    tile = i * gl.num_programs(0) + _place(i)
    batch = tile % n_heads // N_HEAD
    head = tile % N_HEAD
    diagonal = (n_time - 1) // TILE - tile // n_heads  # longest first
    row0 = diagonal * TILE
    first = 0
    common = 0
    if DOCUMENTS:
        starts_ptr += batch.to(gl.int64) * n_time
        first = gl.load(starts_ptr + row0) // TILE
        last_row = gl.minimum(row0 + TILE, n_time) - 1
        common = gl.minimum(gl.cdiv(gl.load(starts_ptr + last_row), TILE), diagonal)
    return batch, head, row0, first, common, diagonal


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    """The next buffer of the ring and its phase, which changes each time around."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _load(tiles, buffers, full, empty, stage, phase, batch, head, time):
    """Asks TMA for one head's tokens from time on, zeros past T, once the buffer is empty."""
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(tiles, [batch, head, time, 0], full.index(stage), buffers.index(stage))


@gluon.jit
def _produce(
    tiles, buffers, full, empty, starts_ptr, n_heads, n_time,
    N_HEAD: gl.constexpr, GROUP: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    q_tiles, k_tiles, v_tiles = tiles
    q_buffers, k_buffers, v_buffers = buffers
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    ROWS: gl.constexpr = q_tiles.block_type.shape[2]
    TILE: gl.constexpr = k_tiles.block_type.shape[2]
    stage = 0
    phase = 1  # a new barrier counts as one whose phase before the first, of parity 1, has ended: buffers start empty
    for i in range(_number_of_tiles(n_heads, n_time, TILE)):
        batch, head, row0, first, _, diagonal = _tile(i, n_heads, n_time, starts_ptr, N_HEAD, TILE, DOCUMENTS)
        for consumer in gl.static_range(TILE // ROWS):
            q_stage = consumer * 2 + i % 2
            row = row0 + consumer * ROWS
            _load(q_tiles, q_buffers, q_full, q_empty, q_stage, (i // 2 + 1) & 1, batch, head, row)
        for back in range(diagonal - first + 1):
            col0 = (diagonal - back) * TILE
            _load(k_tiles, k_buffers, k_full, k_empty, stage, phase, batch, head // GROUP, col0)
            _load(v_tiles, v_buffers, v_full, v_empty, stage, phase, batch, head // GROUP, col0)
            stage, phase = _advance(stage, phase, k_buffers.shape[0])


@gluon.jit
def _scores(q, k_buffers, stage):
    """Starts q kᵀ; the result must be waited for."""
    ROWS: gl.constexpr = q.shape[0]
    BLOCK_N: gl.constexpr = k_buffers.shape[3]
    k = k_buffers.index(stage).reshape([BLOCK_N, k_buffers.shape[4]])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_values(p, v_buffers, stage, y):
    """Starts y + p v."""
    v = v_buffers.index(stage).reshape([v_buffers.shape[3], v_buffers.shape[4]])
    return warpgroup_mma(p, v, y, is_async=True)


@gluon.jit
def _where_seen(s, rows, starts, col0, DIAGONAL: gl.constexpr, DOCUMENTS: gl.constexpr):
    """s where the row's query sees the column's key, else -inf."""
    cols = col0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    if DIAGONAL:
        s = gl.where(cols[None, :] <= rows[:, None], s, float("-inf"))
    if DOCUMENTS:
        s = gl.where(cols[None, :] >= starts[:, None], s, float("-inf"))
    return s


@gluon.jit
def _block(
    q, p, y, row_max, row_sum, k_buffers, v_buffers, full, empty, turn, stage, phase, turns, rows, starts, col0,
    CONSUMER: gl.constexpr, SCALE_LOG2: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Starts the scores of the keys from col0 on and p v of the block before, then computes the p of the new scores."""
    _, k_full, v_full = full
    _, k_empty, v_empty = empty
    v_stage = stage
    v_phase = phase
    stage, phase = _advance(stage, phase, k_buffers.shape[0])
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(turn.index(CONSUMER), turns & 1)
    s = _scores(q, k_buffers, stage)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    y = _add_values(p, v_buffers, v_stage, y)
    mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
    s = warpgroup_mma_wait(1, [s])  # one may still run: p v
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        s = _where_seen(s, rows, starts, col0, False, True)
    new_max = gl.maximum(row_max, gl.max(s, axis=1) * SCALE_LOG2)
    next_p = gl.exp2(s * SCALE_LOG2 - new_max[:, None])
    shrink = gl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + gl.sum(next_p, axis=1)
    y, p = warpgroup_mma_wait(0, [y, p])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    y = y * gl.convert_layout(shrink, gl.SliceLayout(1, y.type.layout))[:, None]
    p = gl.convert_layout(next_p.to(p.dtype), p.type.layout)
    return p, y, new_max, row_sum, stage, phase, turns + 1


@gluon.jit
def _consume(
    buffers, full, empty, turn, y_tiles, lse_ptr, lse_stride, starts_ptr, n_heads, n_time,
    N_HEAD: gl.constexpr, DOCUMENTS: gl.constexpr, SCALE: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """lse is kept in base 2: log2 Σ exp2(s·log2 e)."""
    SCALE_LOG2: gl.constexpr = SCALE * 1.4426950408889634
    q_buffers, k_buffers, v_buffers = buffers
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    ROWS: gl.constexpr = q_buffers.shape[3]
    TILE: gl.constexpr = k_buffers.shape[3]
    D: gl.constexpr = k_buffers.shape[4]
    y_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, y_layout, 2)
    stage = 0
    phase = 0
    turns = 0
    for i in range(_number_of_tiles(n_heads, n_time, TILE)):
        batch, head, row0, first, common, diagonal = _tile(i, n_heads, n_time, starts_ptr, N_HEAD, TILE, DOCUMENTS)
        row0 += CONSUMER * ROWS
        q_stage = CONSUMER * 2 + i % 2
        q = q_buffers.index(q_stage).reshape([ROWS, D])

        # The block on the diagonal.
        mbarrier.wait(q_full.index(q_stage), (i // 2) & 1)
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(turn.index(CONSUMER), turns & 1)
        s = _scores(q, k_buffers, stage)
        mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
        turns += 1
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
        starts = gl.zeros_like(rows)
        if DOCUMENTS:
            starts = gl.load(starts_ptr + batch.to(gl.int64) * n_time + rows, mask=rows < n_time, other=0)
        s = _where_seen(s, rows, starts, diagonal * TILE, True, DOCUMENTS)
        row_max = gl.max(s, axis=1) * SCALE_LOG2
        p = gl.exp2(s * SCALE_LOG2 - row_max[:, None])
        row_sum = gl.sum(p, axis=1)
        p = gl.convert_layout(p.to(q_buffers.dtype), p_layout)
        y = gl.zeros([ROWS, D], gl.float32, y_layout)
        if i > 0:  # TMA has read the y of the tile before: its buffer is free for q
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(CONSUMER * 2 + (i + 1) % 2), count=1)

        # The others, backwards: those that all queries see, then those where documents start.
        for _ in range(diagonal - common):
            p, y, row_max, row_sum, stage, phase, turns = _block(
                q, p, y, row_max, row_sum, k_buffers, v_buffers, full, empty, turn, stage, phase, turns,
                rows, starts, 0, CONSUMER, SCALE_LOG2, False,
            )  # fmt: skip
        if DOCUMENTS:
            for back in range(common - first):
                p, y, row_max, row_sum, stage, phase, turns = _block(
                    q, p, y, row_max, row_sum, k_buffers, v_buffers, full, empty, turn, stage, phase, turns,
                    rows, starts, (common - 1 - back) * TILE, CONSUMER, SCALE_LOG2, True,
                )  # fmt: skip

        # p v of the last block; y leaves through q's buffer.
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.wait(turn.index(CONSUMER), turns & 1)
        y = _add_values(p, v_buffers, stage, y)
        mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
        turns += 1
        y, p = warpgroup_mma_wait(0, [y, p])
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = _advance(stage, phase, k_buffers.shape[0])
        y = y * gl.convert_layout(1 / row_sum, gl.SliceLayout(1, y_layout))[:, None]
        q.store(y.to(q.dtype))
        fence_async_shared()  # TMA sees what ordinary stores wrote
        tma.async_copy_shared_to_global(y_tiles, [batch, head, row0, 0], q_buffers.index(q_stage))
        lse_ptrs = lse_ptr + (batch * N_HEAD + head).to(gl.int64) * lse_stride + rows
        gl.store(lse_ptrs, row_max + gl.log2(row_sum), mask=rows < n_time)
    tma.store_wait(0)


@gluon.jit
def _barriers(N: gl.constexpr, count: gl.constexpr):
    """N barriers whose phases end when `count` have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def _buffers(tiles, N: gl.constexpr):
    return gl.allocate_shared_memory(tiles.dtype, [N] + tiles.block_type.shape, tiles.layout)


@gluon.jit
def _flash_fwd_hopper_kernel(
    q_tiles, k_tiles, v_tiles, y_tiles, lse_ptr, lse_stride, starts_ptr, n_heads, n_time,
    N_HEAD: gl.constexpr, GROUP: gl.constexpr, DOCUMENTS: gl.constexpr, SCALE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One of as many programs as the GPU has multiprocessors; n_heads: of all sequences together."""
    CONSUMERS: gl.constexpr = 2
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    buffers = (_buffers(q_tiles, 2 * CONSUMERS), _buffers(k_tiles, STAGES), _buffers(v_tiles, STAGES))
    full = (_barriers(2 * CONSUMERS, 1), _barriers(STAGES, 1), _barriers(STAGES, 1))
    empty = (_barriers(2 * CONSUMERS, 1), _barriers(STAGES, CONSUMERS), _barriers(STAGES, CONSUMERS))
    turn = _barriers(CONSUMERS, 1)
    mbarrier.arrive(turn.index(0), count=1)
    tiles = (q_tiles, k_tiles, v_tiles)
    gl.warp_specialize(
        [
            (_consume, (buffers, full, empty, turn, y_tiles, lse_ptr, lse_stride, starts_ptr, n_heads, n_time,
                        N_HEAD, DOCUMENTS, SCALE, FIRST)),
            (_consume, (buffers, full, empty, turn, y_tiles, lse_ptr, lse_stride, starts_ptr, n_heads, n_time,
                        N_HEAD, DOCUMENTS, SCALE, SECOND)),
            (_produce, (tiles, buffers, full, empty, starts_ptr, n_heads, n_time, N_HEAD, GROUP, DOCUMENTS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def _tiles(x, block):
    """x (B, T, heads, D) in tiles of `block` tokens of one head, laid out in shared memory as wgmma reads them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor.from_tensor(x.transpose(1, 2), [1, 1, block, x.shape[3]], layout)


@torch.library.custom_op("nanocria::flash_attention_hopper", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (B, T, H, D) and lse (B, T, H), as flash_attention.py's."""
    y, lse = _forward_fake(q, k, v, starts)
    if y.numel() == 0:
        return y, lse
    n_batch, n_time, n_head, head_dim = q.shape
    q, k, v = (_readable(x) for x in (q, k, v))
    n_tiles = n_batch * n_head * triton.cdiv(n_time, BLOCK_N)
    n_multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    _flash_fwd_hopper_kernel[(min(n_tiles, n_multiprocessors),)](
        _tiles(q, ROWS), _tiles(k, BLOCK_N), _tiles(v, BLOCK_N), _tiles(y, ROWS), lse, lse.stride(2),
        lse if starts is None else starts, n_batch * n_head, n_time,
        N_HEAD=n_head, GROUP=n_head // k.shape[2], DOCUMENTS=starts is not None, SCALE=head_dim**-0.5,
        STAGES=STAGES[head_dim], num_warps=4, maxnreg=LAUNCH_REGISTERS,
    )  # fmt: skip
    return y, lse


_forward.register_fake(_forward_fake)


@torch.library.custom_op("nanocria::flash_attention_cudnn_backward", mutates_args=())
def _cudnn_backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq (B, T, H, D), dk and dv (B, T, K, D), by cuDNN."""
    n_time = q.shape[1]
    natural = (lse.transpose(1, 2) * math.log(2)).unsqueeze(-1).contiguous()  # (B, H, T, 1), in base e
    dy, q, k, v, y = (x.transpose(1, 2) for x in (dy, q, k, v, y))
    no_dropout = torch.empty(2, dtype=torch.int64, device=q.device)  # seed and offset
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, y, natural, no_dropout[0], no_dropout[1], None, None, None, n_time, n_time, 0.0, True
    )
    return tuple(x.transpose(1, 2) for x in gradients)


@_cudnn_backward.register_fake
def _cudnn_backward_fake(dy, q, k, v, y, lse):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


class _FlashAttentionHopper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts):
        y, lse = _forward(q, k, v, starts)
        ctx.save_for_backward(q, k, v, y, lse, starts)
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward()
        q, k, v, y, lse, starts = ctx.saved_tensors
        if starts is not None or triton_suits(q.shape[3], q.shape[1], q.dtype):
            gradients = _backward(dy, q, k, v, y, lse, starts)
        else:
            gradients = _cudnn_backward(dy, q, k, v, y, lse)
        return *gradients, None


def triton_suits(head_dim: int, n_time: int, dtype: torch.dtype) -> bool:
    """True if backward is flash_attention.py's, False if it is cuDNN's, which also holds dq in fp32."""
    return head_dim == 64 and n_time <= TRITON_TOKENS and dtype in (torch.bfloat16, torch.float16)


def hopper_supports(q: torch.Tensor) -> bool:
    """True for queries q (B, T, H, D) of 2-byte numbers, heads of 64 or 128, on a Hopper GPU."""
    if not HAS_TRITON or INTERPRETED or not q.is_cuda or q.shape[3] not in STAGES:
        return False
    return q.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(q.device)[0] == 9


def flash_attention_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """flash_attention of tensors that hopper_supports() accepts; faster, but dq by cuDNN may differ in its last bits.

    q (B, T, H, D), k and v (B, T, K, D) of any strides, starts (B, T) or None, as there. Returns y (B, T, H, D).
    """
    return _FlashAttentionHopper.apply(q, k, v, None if starts is None else starts.int().contiguous())
