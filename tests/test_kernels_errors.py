"""Arguments that a kernel would read or write memory outside of are refused before it runs."""

import sys

import pytest
import torch

import kernels
from test_kernels import BF16, DEVICE, FP16, FP32, OPERATIONS, add_norm_linear, add_norm_mlp


def zeros(*shape, dtype=FP32, **options):
    return torch.zeros(shape, dtype=dtype, device=DEVICE, **options)


# fmt: off
X = zeros(2, 4)
HALF = X.half()
LABELS = zeros(2, dtype=torch.int64)
TABLE = zeros(2, 2)
HEADS = zeros(1, 2, 3, 4)
Q = zeros(2, 8, 4, 16)
K = zeros(2, 8, 2, 16)
STARTS = zeros(2, 8, dtype=torch.int64)
KV = [zeros(1, 1, 1, 4)] * 2
CACHES = [zeros(1, 5, 1, 4)] * 2
V = zeros(4)
W = zeros(700)
CODES = zeros(700, dtype=torch.uint8)
STATES = CODES, CODES, zeros(3), zeros(3)
OPTIONS = 0.9, 0.95, 1e-8, 0.1
ON_CPU = 1.0, 0.1, 1, *OPTIONS
REFUSED = {
    "rms_norm": [(X, zeros(3)), (zeros(1, 65537), zeros(65537)), (zeros(2, 0), zeros(0))],
    "add_rms_norm": [(X, X, zeros(5)), (X, zeros(3, 4), V), (X, HALF, V)],
    "glu": [(zeros(2, 5),), (zeros(2, 6), "erf")],
    "rope": [(zeros(1, 2, 4, 4), TABLE, TABLE, 1), (HEADS, TABLE, TABLE, 3), (HEADS, X, X, 1),
             (HEADS, TABLE, zeros(1, 2, 2), 1), (HEADS, zeros(2, 2, requires_grad=True), TABLE, 1)],
    "add_norm_linear": [(X, zeros(2, 5), V, zeros(3, 4)), (X, None, V, zeros(3, 5)), (X, None, V, zeros(3, 4, 1))],
    "add_norm_mlp": [(X, HALF, V, zeros(6, 4), zeros(4, 3)), (X, X, V, zeros(6, 4, dtype=FP16), zeros(4, 3)),
                     (X, X, V, zeros(6, 4), zeros(4, 6)), (X, X, V, zeros(7, 4), zeros(4, 3))],
    "cross_entropy": [(X, LABELS[:1]), (X, LABELS.float())],
    "linear_cross_entropy": [
        (X, zeros(9, 5), LABELS), (X, zeros(9, 4, dtype=FP16), LABELS), (zeros(3, 4), zeros(9, 4), LABELS),
        (HALF, zeros(9, 4, dtype=FP16), LABELS, None, False)],
    "flash_attention": [
        (Q, K[:, :7], K[:, :7]), (Q, K, K[..., :8]), (Q, K.double(), K), (Q[:, :, :3], K, K), (Q, K, K, STARTS[:, :7]),
        (zeros(2, 8, 4, 24), *[zeros(2, 8, 2, 24)] * 2)],
    "fp8_linear": [(zeros(4, 24, dtype=BF16), zeros(16, 24, dtype=BF16)),
                   (zeros(4, 32, dtype=BF16), zeros(16, 48, dtype=BF16)), (zeros(4, 32), zeros(16, 32))],
    "add_low_rank": [(zeros(4, 8), zeros(4, 2), zeros(8, 3)), (zeros(4, 8), zeros(4, 2), zeros(6, 2), 3),
                     (zeros(8, 4).T, zeros(4, 2), zeros(8, 2))],
    "decode_attention": [(zeros(1, 1, 2, 4, requires_grad=True), *KV, *CACHES, LABELS[:1]),
                         (zeros(1, 1, 2, 4), *KV, *[x.mT for x in CACHES], LABELS[:1])],
    "adamw": [(zeros(4, 3).T, *[zeros(3, 4)] * 4, V, *OPTIONS), (V, zeros(3), V, V, V, V, *OPTIONS),
              (V, V, V.short(), V, V, V, *OPTIONS), (*[V] * 5, zeros(8)[::2], *OPTIONS)],
    "adamw8bit": [(W, W, W, CODES[:4], *STATES[1:], V, *OPTIONS), (W, W, W.short(), *STATES, V, *OPTIONS),
                  (W, W, W, CODES, CODES, zeros(2), zeros(3), V, *OPTIONS),
                  (W, W, W, CODES.repeat(2)[::2], *STATES[1:], V, *OPTIONS)],
    "adamw_on_cpu": [([V] * 3 + [V[:2], V, *ON_CPU]), ([V] * 4 + [zeros(8)[::2], *ON_CPU])],
    "adamw8bit_on_cpu": [(W.bfloat16(), W, W.short(), *STATES, *ON_CPU)],
    "sgdw": [(TABLE, TABLE[:1], TABLE, zeros(2), 1.0, 0.0), (TABLE, X[:, ::2], TABLE, zeros(2), 1.0, 0.0),
             (TABLE.half(), TABLE, TABLE.half(), zeros(2), 1.0, 0.0), (TABLE, TABLE, TABLE, zeros(1), 1.0, 0.0)],
    "add_ranks": [(zeros(8), zeros(3, 4), 1.0, zeros(8)), (zeros(8), zeros(8, 3).T, 1.0, zeros(8))],
    "quantize_nf4": [(zeros(2, 33),), (zeros(3, 20),), (zeros(64, 4).T,)],
}
# fmt: on
FUNCTIONS = vars(kernels) | {"add_norm_linear": add_norm_linear, "add_norm_mlp": add_norm_mlp}
for name in ("adamw", "adamw8bit"):
    FUNCTIONS[f"{name}_on_cpu"] = getattr(sys.modules[f"kernels.{name}"], f"{name}_on_cpu")


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused(name):
    for arguments in REFUSED[name]:
        with pytest.raises((AssertionError, ValueError)):
            FUNCTIONS[name](*arguments)


@pytest.mark.parametrize("name", ["add_norm_linear", "add_norm_mlp", "linear_cross_entropy", "lora"])
def test_matmuls_under_autocast_are_refused(name):
    if name == "lora":
        function = kernels.LoRALinear(kernels.Linear(4, 2).to(DEVICE), 1, 1.0)
        inputs = (X,)
        constants = ()
    else:
        function = OPERATIONS[name].function
        (inputs, constants) = OPERATIONS[name].inputs(3, 8, FP32)
    with torch.autocast(DEVICE, BF16), pytest.raises(ValueError, match="not run under torch.autocast: cast"):
        function(*inputs, *constants)
