"""The kernels past 2³¹ elements and at full size; the losses' full sizes are in test_kernels_loss.py."""

import pytest
import torch

from test_kernels import (
    BF16,
    DEVICE,
    OPERATIONS,
    ROW_OPERATIONS,
    as_tuple,
    assert_matches_float64,
    assert_same,
    draw_upstream,
    full_size,
    in_another_process,
    one_at_a_time,
    randn,
    rope_inputs,
    rope_of,
    run,
)


def apart(base, packed, dim, start, stride):
    """packed's values, `stride` elements apart along dim (4 long): with 2³⁰ the last lies past 2³¹."""
    strides = list(torch.empty(packed.shape, device="meta").stride())
    strides[dim] = stride
    return base.as_strided(packed.shape, strides, start).copy_(packed)


def run_apart(base, dim, stride, function, inputs, constants, upstream):
    spread = [
        x if x.ndim < 2 or x.shape[dim] != 4 else apart(base, x, dim, 100 * i, stride)
        for i, x in enumerate([*inputs, *upstream])
    ]
    return run(function, spread[: len(inputs)], constants, spread[len(inputs) :])


def compare_far_apart():
    """Every dimension of every row operation's inputs and gradients, stretched past 2³¹ elements in turn."""
    torch.manual_seed(0)
    base = torch.empty(3 * 2**30 + 1024, dtype=BF16, device=DEVICE)  # virtual on a CPU: few of its pages are touched
    for name in ROW_OPERATIONS + ["cross_entropy"]:
        operation = OPERATIONS[name]
        for dim in (0, 1, 2, 3, -2) if name == "rope" else (0, 1):
            if name == "rope":  # heads, dimension 2, are stretched twice: 4 packed, then 4 of q, of k and of v
                operation, n_heads = (rope_of(4), 12) if dim == -2 else (rope_of(2), 4)
                sizes = [2, 2, n_heads, 2]
                sizes[dim] = n_heads if dim in (2, -2) else 4
                qkv = randn(*sizes, dtype=BF16)
                angles = torch.rand(qkv.shape[1], qkv.shape[3] // 2, device=DEVICE)
                inputs, constants = (qkv,), (angles.cos(), angles.sin())
            else:
                inputs, constants = operation.inputs(4, 2 if "glu" in name else 4, BF16)
            upstream = draw_upstream(as_tuple(operation.oracle(*inputs, *constants)))
            print(name, "dimension", dim, flush=True)
            arguments = operation.function, inputs, constants, upstream
            ours = run_apart(base, dim, 2**30, *arguments)
            # Triton orders a row's sum by the strides' divisors: cross_entropy repeats bits only for like strides.
            expected = run_apart(base, dim, 2**10, *arguments) if name == "cross_entropy" else run(*arguments)
            assert_same(ours, expected, f"{name}, dimension {dim}")
    print("all compared")


@one_at_a_time
def test_strides_past_2_to_the_31():
    code = "import tests.test_kernels_large as test; test.compare_far_apart()"
    assert "all compared" in in_another_process(code)


@full_size
@pytest.mark.parametrize("name", [*ROW_OPERATIONS, "cross_entropy"])
def test_results_past_2_to_the_31_elements(name):
    """One row, expanded until the packed results pass 2³¹ elements: each must equal the first."""
    columns = {"rope": 64, "cross_entropy": 128256}.get(name, 32768)
    per_row = {"rope": 10 * 128, "swiglu": 65536, "geglu_tanh": 65536, "geglu_none": 65536}.get(name, columns)
    rows = 2**31 // per_row + 2
    inputs, constants = OPERATIONS[name].inputs(1, columns, BF16)
    if name == "rope":
        inputs = [x[:1].expand(1, rows, *x.shape[2:]) for x in inputs]
        constants = [t.expand(rows, columns) for t in constants]
    else:
        inputs = [x.expand(rows, x.shape[1]) if x.ndim > 1 else x for x in inputs]
        constants = [t.expand(rows) for t in constants]
    dim = 1 if name == "rope" else 0
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = as_tuple(OPERATIONS[name].function(*leaves, *constants))
    upstream = [randn().to(y.dtype).expand(y.shape) for y in outputs]
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    for result in (*outputs, *gradients):
        if result.ndim > 1:
            for row in (rows // 2, rows - 2, rows - 1):
                assert torch.equal(result.select(dim, 0), result.select(dim, row)), f"{name}: row {row} of {rows}"


FULL_SIZE = [
    *((name, 16384, 2048) for name in ("rms_norm", "add_rms_norm", "layer_norm")),
    *((name, 4096, 16384) for name in ("rms_norm", "add_rms_norm", "layer_norm")),
    *((name, 1000, 65536) for name in ("rms_norm", "add_rms_norm", "layer_norm")),
    *((name, 8192, 14336) for name in ("swiglu", "geglu_tanh", "geglu_none")),
]


@full_size
@pytest.mark.parametrize("name, rows, width", FULL_SIZE)
def test_full_size_matches_float64(name, rows, width):
    assert_matches_float64(OPERATIONS[name], *OPERATIONS[name].inputs(rows, width, BF16))


@full_size
@pytest.mark.parametrize("heads, kv_heads, half", [(32, 8, 32), (32, 8, 64), (24, 8, 64)])
def test_rope_at_full_size_matches_float64(heads, kv_heads, half):
    assert_matches_float64(rope_of(heads), *rope_inputs(8192, half, BF16, heads, kv_heads))
