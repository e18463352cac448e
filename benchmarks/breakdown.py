"""Where the milliseconds of nanocria's real step go, and the minimum that each part could take.

breakdown() runs train.py in this process, records what the GPU does, and reports three steps.

A part's floor is its FLOPs over the rate of a large matmul, or its bytes over the rate of a large copy, both measured
right after the run. The bytes assume that each operation is one kernel, which reads its inputs and writes its outputs
once.
"""

import bisect
import re

import torch

from benchmarks import timing
from benchmarks.child import run_train_py
from benchmarks.trainers import llama_config
from model import LlamaConfig
from runtime import memory

WARMUP_STEPS = 5
PROFILED_STEPS = 3
Span = tuple[float, float, str]  # start and end in ms, the kernel's name or its part

# A kernel belongs to the first pattern that its name matches. Attention comes before the matmuls, because some of its
# kernels are cutlass's too; copies come before the optimizer, because both are multi_tensor_apply_kernel.
PARTS = {
    "loss kernel": r"^_(loss|gradient)_kernel|cross_entropy",
    "norms": r"rms_norm|_sum_rows",
    "SwiGLU": r"_glu|swiglu",
    "RoPE": r"_rope",
    "attention": r"cudnn|fmha|flash|attention",
    "casts and copies": r"nccl|memcpy|memset|split_with_sizes|chunk_cat|multi_tensor_apply.*copy|copy_kernel|CatArray",
    "optimizer": r"adam|multi_tensor_apply|lpnorm",
    "matmuls": r"nvjet|gemm|cutlass|cublas|splitk|xmma",
    "other": r"",
}


def part_of(kernel: str) -> str:
    return next(part for part, pattern in PARTS.items() if re.search(pattern, kernel, re.IGNORECASE))


def spans_of_a_run(argv: list[str]) -> list[Span]:
    """Run train.py; return everything the GPU did, each span named by its part."""
    events = timing.gpu_events([lambda: run_train_py([*argv, f"--max_iters={WARMUP_STEPS + PROFILED_STEPS + 1}"])])
    return sorted((e.time_range.start / 1000, e.time_range.end / 1000, part_of(e.name)) for e in events)


def step_starts(spans: list[Span]) -> list[int]:
    """Where the steps begin: at the first loss kernel, and at the first one after each update."""
    starts = []
    before = "optimizer"
    for i, (_, _, part) in enumerate(spans):
        if part == "loss kernel" and before == "optimizer":
            starts.append(i)
        if part in ("loss kernel", "optimizer"):
            before = part
    return starts


def name_head_matmuls(spans: list[Span]) -> list[Span]:
    """Rename the head's matmuls: three for each loss kernel of a step, beginning with the one before the first loss."""
    spans = list(spans)
    starts = step_starts(spans)
    matmuls = [i for i, (_, _, part) in enumerate(spans) if part == "matmuls"]
    for start, end in zip(starts, [*starts[1:], len(spans)], strict=True):
        n_losses = sum(part == "loss kernel" for _, _, part in spans[start:end])
        first = bisect.bisect(matmuls, start) - 1
        for i in matmuls[first : first + 3 * n_losses]:
            begin, finish, _ = spans[i]
            spans[i] = (begin, finish, "loss matmuls")
    return spans


def floors_ms(c: LlamaConfig, batch: int, copy_tb_s: float, matmul_tflops: float) -> dict[str, float | None]:
    """The minimum ms of each part in one step."""
    n = batch * c.block_size
    layers = c.n_layer
    kv = c.n_kv_head * c.head_dim
    in_blocks = layers * (2 * c.n_embd**2 + 2 * c.n_embd * kv + 3 * c.n_embd * c.ffn_dim)  # matmuls' weights
    flops = {
        "matmuls": 6 * n * in_blocks,
        "loss matmuls": 6 * n * c.n_embd * c.vocab_size,
        "attention": 6 * n * layers * c.n_embd * c.block_size,  # causal, no recomputation
    }
    bf16 = 2
    fp32 = 4
    moved = {
        "loss kernel": bf16 * n * c.vocab_size * 2,  # the logits read, their gradient written
        # forward x, residual -> normed, sum; backward two gradients, sum -> gradient
        "norms": bf16 * n * c.n_embd * 8 * (2 * layers + 1),
        "SwiGLU": bf16 * n * c.ffn_dim * 8 * layers,  # gate, up -> product; its gradient, gate, up -> two gradients
        "RoPE": bf16 * n * (c.n_embd + kv) * 4 * layers,  # q and k read and written, forward and backward
        # gradients read for their norm and for the update; both halves of w, m and v read and written
        "optimizer": (bf16 * 6 + fp32 * 4) * memory.n_params(c),
    }
    floors = {part: 1000 * f / (matmul_tflops * 1e12) for part, f in flops.items()} | {"casts and copies": 0.0}
    return floors | {part: 1000 * b / (copy_tb_s * 1e12) for part, b in moved.items()}


def fastest_matmul_tflops(n: int = 8192) -> float:
    """TFLOP/s of the fastest of ten products, after a thousand copies that warm up the card.

    timing.matmul_tflops is a tenth lower: under continuous matmuls the card lowers its clock, but not between the other
    kernels of a step. A floor must lie below what a step's matmuls take.
    """
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.mm(a, b)
    timing.events_ms([lambda: torch.clone(a)], rounds=1000)
    return 2 * n**3 / min(timing.events_ms([lambda: torch.mm(a, b)], rounds=10)) / 1e9


def breakdown(argv: list[str], batch: int, block: int) -> dict:
    """argv: train.py's command line, as in config/llama32_1b.py --batch_size=8 --block_size=2048 (batch, block)."""
    config = llama_config(argv[0], block_size=block)
    spans = name_head_matmuls(spans_of_a_run(argv))
    starts = step_starts(spans)
    first = starts[WARMUP_STEPS]
    last = starts[WARMUP_STEPS + PROFILED_STEPS]
    busy = dict.fromkeys([*PARTS, "loss matmuls"], 0.0)
    for start, end, part in spans[first:last]:  # on one GPU nothing overlaps
        busy[part] += end - start
    ms = spans[last][0] - spans[first][0]
    torch.cuda.empty_cache()
    timing.use_side_stream()
    floors = floors_ms(config, batch, timing.copy_tb_s(), fastest_matmul_tflops())
    rows = [{"part": part, "ms": time / PROFILED_STEPS, "floor_ms": floors.get(part)} for part, time in busy.items()]
    rows.sort(key=lambda row: -row["ms"])
    return {"rows": [*rows, {"part": "idle", "ms": (ms - sum(busy.values())) / PROFILED_STEPS, "floor_ms": 0.0}]}
