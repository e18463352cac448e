"""Invalid arguments: each raises a ValueError that says what was found and what was expected."""

import re
import sys

import pytest
import torch

import kernels
from test_kernels import BF16, DEVICE, FP16, FP32, OPERATIONS, add_norm_linear, add_norm_mlp


def zeros(*shape, dtype=FP32, **options):
    return torch.zeros(shape, dtype=dtype, device=DEVICE, **options)


# fmt: off
X, HALF, LABELS = zeros(2, 4), zeros(2, 4, dtype=FP16), zeros(2, dtype=torch.int64)
TABLE, HEADS = zeros(2, 2), zeros(1, 2, 3, 4)
Q, K, STARTS = zeros(2, 8, 4, 16), zeros(2, 8, 2, 16), zeros(2, 8, dtype=torch.int64)
ON_CPU, CPU_OPTIONS = [torch.ones(8) for _ in range(4)], (1.0, 0.1, 1, 0.9, 0.95, 1e-8, 0.1)
KV, CACHES = [zeros(1, 1, 1, 4)] * 2, [zeros(1, 5, 1, 4)] * 2
V, W, CODES = zeros(4), zeros(700), zeros(700, dtype=torch.uint8)
STATES, OPTIONS = (CODES, CODES, zeros(3), zeros(3)), (V, 0.9, 0.95, 1e-8, 0.1)
ERRORS = [
    ("rms_norm", (X, zeros(3)), {}, "weight has shape (3,), expected (4,) for x (2, 4)"),
    ("rms_norm", (zeros(1, 65537), zeros(65537)), {}, "rows of 65537 elements: 1 to 65,536 are supported"),
    ("rms_norm", (zeros(2, 0), zeros(0)), {}, "rows of 0 elements: 1 to 65,536 are supported"),
    ("add_rms_norm", (X, X, zeros(5)), {}, "weight has shape (5,), expected (4,) for x (2, 4)"),
    ("add_rms_norm", (X, zeros(3, 4), V), {}, "x is torch.float32 (2, 4) and delta torch.float32 (3, 4): they must"),
    ("add_rms_norm", (X, HALF, V), {}, "delta torch.float16 (2, 4): they must agree"),
    ("layer_norm", (X, V, zeros(3)), {}, "weight (4,) and bias (3,): expected both (4,)"),
    ("layer_norm", (zeros(1, 65540), zeros(65540), zeros(65540)), {}, "rows of 65540 elements: 1 to 65,536"),
    ("swiglu", (zeros(2, 5),), {}, "gate_up has 5 columns: gate and up need an even number"),
    ("geglu", (zeros(2, 6),), {"approximate": "erf"}, "approximate must be 'tanh' or 'none', got 'erf'"),
    ("rope", (zeros(1, 2, 4, 4), TABLE, TABLE, 1), {}, "qkv (1, 2, 4, 4) with n_head 1: expected (B, T, H + 2K, D)"),
    ("rope", (HEADS, TABLE, TABLE, 3), {}, "qkv (1, 2, 3, 4) with n_head 3: expected (B, T, H + 2K, D)"),
    ("rope", (zeros(1, 2, 4, 4), TABLE, TABLE, 0), {}, "with n_head 0: expected (B, T, H + 2K, D)"),
    ("rope", (zeros(1, 2, 3, 5), TABLE, TABLE, 1), {}, "qkv (1, 2, 3, 5) with n_head 1: expected (B, T, H + 2K, D)"),
    ("rope", (HEADS, *[zeros(2, 3)] * 2, 1), {}, "sin (2, 3): expected both (2, 2) or both (1, 2, 2)"),
    ("rope", (HEADS, TABLE, zeros(1, 2, 2), 1), {}, "cos (2, 2) and sin (1, 2, 2): expected both"),
    ("rope", (HEADS, zeros(2, 2, requires_grad=True), TABLE, 1), {}, "no gradient for cos and sin: detach them"),
    ("rope", (HEADS, TABLE, zeros(2, 2, requires_grad=True), 1), {}, "no gradient for cos and sin"),
    ("add_norm_linear", (X, zeros(2, 5), V, zeros(3, 4)), {}, "delta torch.float32 (2, 5): they"),
    ("add_norm_linear", (X, None, V, zeros(3, 5)), {}, "weight torch.float32 (3, 5): expected torch.float32 (outputs"),
    ("add_norm_linear", (X, None, V, zeros(3, 4, 1)), {}, "weight torch.float32 (3, 4, 1): expected"),
    ("add_norm_mlp", (X, HALF, V, zeros(6, 4), zeros(4, 3)), {}, "x is torch.float32 (2, 4) and delta torch.float16"),
    ("add_norm_mlp", (X, X, V, zeros(6, 4, dtype=FP16), zeros(4, 3)), {}, "gate_up_weight torch.float16 (6, 4)"),
    ("add_norm_mlp", (X, X, V, zeros(6, 4), zeros(4, 6)), {}, "(4, 6): expected torch.float32 (outputs, 3)"),
    ("add_norm_mlp", (X, X, V, zeros(7, 4), zeros(4, 3)), {}, "gate_up_weight has 7 rows"),
    ("add_norm_mlp", (X, X, V, zeros(6, 4), zeros(4, 3)), {"chunks": 2}, "chunks is 2: must be at least 1, and"),
    ("add_norm_mlp", (X, X, V, zeros(6, 4), zeros(4, 3)), {"save_gate_up": False, "chunks": 0}, "chunks is 0: must"),
    ("adamw", (zeros(4, 3).T, *[zeros(3, 4)] * 4, *OPTIONS), {},
     "parameter is torch.float32 (3, 4) with strides (1, 3), expected torch.float32 (3, 4), contiguous"),
    ("adamw", (V, zeros(3), V, V, V, *OPTIONS), {}, "grad is torch.float32 (3,) with strides (1,), expected"),
    ("adamw", (V, V, V.short(), V, V, *OPTIONS), {}, "w is torch.int16"),
    ("adamw", (V, V, V.half(), V, V, *OPTIONS), {}, "w is torch.float16 (4,)"),
    ("adamw", (*[V] * 5, zeros(8)[::2], *OPTIONS[1:]), {}, "step_scalars is torch.float32 (4,) with strides (2,)"),
    ("adamw8bit", (W, W, W, CODES[:4], *STATES[1:], *OPTIONS), {}, "m is torch.uint8 (4,)"),
    ("adamw8bit", (W, W, W, CODES, W, *STATES[2:], *OPTIONS), {}, "v is torch.float32 (700,)"),
    ("adamw8bit", (W, W, W, CODES, CODES, zeros(2), zeros(3), *OPTIONS), {}, "m_absmax is torch.float32 (2,)"),
    ("adamw8bit", (W, W, W.short(), *STATES, *OPTIONS), {}, "w is torch.int16 (700,)"),
    ("adamw8bit", (W.bfloat16(), W.view(7, 100), W.short(), *STATES, *OPTIONS), {}, "grad is torch.float32 (7, 100)"),
    ("adamw8bit", (W, W, W, CODES.repeat(2)[::2], *STATES[1:], *OPTIONS), {}, "(700,) with strides (2,)"),
    ("adamw8bit", (W, W, W, *STATES, zeros(3), *OPTIONS[1:]), {}, "step_scalars is torch.float32 (3,)"),
    ("adamw8bit_on_cpu", (W.cpu().bfloat16(), W.cpu(), W.cpu().short(), *(x.cpu() for x in STATES), *CPU_OPTIONS), {},
     "w is torch.int16 (700,)"),
    ("sgdw", (TABLE, TABLE[:1], TABLE, zeros(2), 1.0, 0.0), {}, "direction is"),
    ("sgdw", (TABLE, X[:, ::2], TABLE, zeros(2), 1.0, 0.0), {}, "contiguous"),
    ("sgdw", (TABLE.half(), TABLE, TABLE.half(), zeros(2), 1.0, 0.0), {}, "w is torch.float16"),
    ("sgdw", (TABLE, TABLE, TABLE, zeros(1), 1.0, 0.0), {}, "step_scalars"),
    ("cross_entropy", (X, LABELS), {"z_loss": float("nan")}, "z_loss nan must not be negative"),
    ("cross_entropy", (X, zeros(3)), {}, "targets (3,) do not fit logits (2, 4)"),
    ("cross_entropy", (X, zeros(2)), {}, "targets (2,) torch.float32: expected 2 integers, one per row"),
    ("cross_entropy", (X, LABELS), {"label_smoothing": 1.5}, "label_smoothing 1.5 must lie in [0, 1]"),
    ("cross_entropy", (X, LABELS), {"reduction": "max"}, "reduction must be one of mean, sum, none; got 'max'"),
    ("linear_cross_entropy", (X, zeros(9, 4), LABELS), {"reduction": "none"}, "must be one of mean, sum; got 'none'"),
    ("linear_cross_entropy", (X, zeros(9, 4), LABELS), {"z_loss": -1.0}, "z_loss -1.0 must not be negative"),
    ("linear_cross_entropy", (HALF, zeros(9, 4, dtype=FP16), LABELS), {"fp32_dweight": False}, "not work in float16"),
    ("linear_cross_entropy", (X, zeros(9, 4), LABELS), {"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
    ("linear_cross_entropy", (X, zeros(9, 5), LABELS), {}, "weight torch.float32 (9, 5): expected (N, C) and (V, C)"),
    ("linear_cross_entropy", (X, zeros(9, 4, dtype=FP16), LABELS), {}, "and weight torch.float16 (9, 4)"),
    ("linear_cross_entropy", (X[None], zeros(9, 4), LABELS), {}, "x torch.float32 (1, 2, 4) and weight"),
    ("linear_cross_entropy", (X, zeros(9, 4), LABELS[None]), {}, "targets (1, 2): expected (2,)"),
    ("linear_cross_entropy", (zeros(3, 4), zeros(9, 4), LABELS), {}, "targets (2,) torch.int64: expected 3 integers"),
    ("flash_attention", (Q[0], K, K), {}, "q (8, 4, 16), k (2, 8, 2, 16), v (2, 8, 2, 16): expected (B, T, H, D)"),
    ("flash_attention", (Q, K[:, :7], K[:, :7]), {}, "k (2, 7, 2, 16)"),
    ("flash_attention", (Q, K, K[..., :8]), {}, "v (2, 8, 2, 8)"),
    ("flash_attention", (Q, K[:, :, 0], K[:, :, 0]), {}, "k (2, 8, 16), v (2, 8, 16): expected"),
    ("flash_attention", (Q, zeros(2, 8, 2, 32), zeros(2, 8, 2, 32)), {}, "k (2, 8, 2, 32), v (2, 8, 2, 32)"),
    ("flash_attention", (Q, K.double(), K), {}, "k torch.float64"),
    ("flash_attention", (Q, K, K.double()), {}, "v torch.float64"),
    ("flash_attention", (Q.long(), K.long(), K.long()), {}, "q is torch.int64"),
    ("flash_attention", (Q[:, :, :3], K, K), {}, "3 query heads cannot share 2 key/value heads"),
    ("flash_attention", (Q[:, :, :0], K, K), {}, "0 query heads cannot share 2 key/value heads"),
    ("flash_attention", (Q, K[:, :, :0], K[:, :, :0]), {}, "4 query heads cannot share 0 key/value heads"),
    ("flash_attention", (zeros(2, 8, 4, 24), *[zeros(2, 8, 2, 24)] * 2), {}, "head size 24: 16, 32, 64 and 128"),
    ("flash_attention", (Q, K, K, STARTS[:, :7]), {}, "starts (2, 7) torch.int64: expected integers (2, 8)"),
    ("flash_attention", (Q, K, K, STARTS.float()), {}, "starts (2, 8) torch.float32"),
    ("fp8_linear", (zeros(4, 32), zeros(16, 32)), {}, "x is torch.float32: float8 matmuls read and write"),
    ("fp8_linear", (zeros(4, 24).bfloat16(), zeros(16, 24).bfloat16()), {}, "weight (16, 24): float8 matmuls need"),
    ("fp8_linear", (zeros(4, 32).bfloat16(), zeros(24, 32).bfloat16()), {}, "weight (24, 32): float8 matmuls need"),
    ("fp8_linear", (zeros(4, 32).bfloat16(), zeros(16, 48).bfloat16()), {}, "weight torch.bfloat16 (16, 48): expected"),
    ("add_low_rank", (zeros(4, 8), zeros(4, 2), zeros(8, 3)), {}, "b torch.float32 (8, 3), first 0: expected (N, "),
    ("add_low_rank", (zeros(4, 8), zeros(4, 2), zeros(6, 2), 3), {}, "first 3: expected (N, first + O or more)"),
    ("add_low_rank", (zeros(4, 8), zeros(4, 2).half(), zeros(8, 2)), {}, "of one dtype"),
    ("add_low_rank", (zeros(4, 8), zeros(4, 2, requires_grad=True), zeros(8, 2)), {}, "add_low_rank has no backward"),
    ("decode_attention", (zeros(1, 1, 2, 4, requires_grad=True), *KV, *CACHES, LABELS[:1]), {}, "has no backward"),
    ("decode_attention", (zeros(1, 1, 2, 4), *KV, *[x.mT for x in CACHES], LABELS[:1]), {}, "contiguous"),
    ("add_ranks", (zeros(8), zeros(3, 4), 1.0, zeros(8)), {}, "out (8,): expected (n,), (ranks - 1, n) and (n,)"),
    ("add_ranks", (zeros(8), zeros(8, 3).T, 1.0, zeros(8)), {}, "contiguous"),
    ("add_ranks", (zeros(8), zeros(3, 8), 1.0, zeros(16)[::2]), {}, "contiguous"),
    ("adamw_on_cpu", (ON_CPU[0].bfloat16(), ON_CPU[0], ON_CPU[0].short(), *ON_CPU[:2], *CPU_OPTIONS), {}, "w is torch"),
    ("adamw_on_cpu", (*ON_CPU[:3], ON_CPU[0][:4], ON_CPU[0], *CPU_OPTIONS), {}, "m is torch.float32 (4,)"),
    ("adamw_on_cpu", (*ON_CPU, ON_CPU[0][::2], *CPU_OPTIONS), {}, "v is torch.float32 (4,)"),
]
# fmt: on


FUNCTIONS = vars(kernels) | {"add_norm_linear": add_norm_linear, "add_norm_mlp": add_norm_mlp}
for name in ("adamw", "adamw8bit"):
    FUNCTIONS[f"{name}_on_cpu"] = getattr(sys.modules[f"kernels.{name}"], f"{name}_on_cpu")


@pytest.mark.parametrize("name, arguments, options, message", ERRORS, ids=[error[-1] for error in ERRORS])
def test_invalid_arguments_raise_value_errors_that_say_what_was_found(name, arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FUNCTIONS[name](*arguments, **options)


@pytest.mark.parametrize("name", ["add_norm_linear", "add_norm_mlp", "linear_cross_entropy", "lora"])
def test_matmuls_under_autocast_are_refused(name):
    if name == "lora":
        function, inputs, constants = kernels.LoRALinear(kernels.Linear(4, 2).to(DEVICE), 1, 1.0), (X,), ()
    else:
        function, (inputs, constants) = OPERATIONS[name].function, OPERATIONS[name].inputs(3, 8, FP32)
    with torch.autocast(DEVICE, BF16), pytest.raises(ValueError, match="not run under torch.autocast: cast"):
        function(*inputs, *constants)
