"""flash_attention_hopper gives the numbers of flash_attention, and its kernel compiles without a Hopper GPU."""

import importlib
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import triton

from kernels.flash_attention_hopper import flash_attention_hopper, hopper_supports
from test_kernels import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    HAS_GPU,
    attention_oracle,
    documents,
    in_another_process,
    randn,
    relative_error,
    run,
)

MODULE = importlib.import_module("kernels.flash_attention_hopper")
on_hopper = pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU (compute capability 9.0)"
)


def compile_for_hopper():
    """Compiles the kernel in all its forms; nothing runs. Triton needs only a driver that names the GPU."""
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target,
        )
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    launch = triton.runtime.jit.JITFunction.run
    compiled = []

    def compile_only(kernel, *arguments, warmup, **options):
        compiled.append(launch(kernel, *arguments, warmup=True, **options))

    triton.runtime.jit.JITFunction.run = compile_only
    for head_dim, n_time, with_documents in product((64, 128), (1, 300), (False, True)):
        q, k, v = (torch.zeros(1, n_time, heads, head_dim, dtype=BF16) for heads in (4, 2, 2))
        MODULE._forward(q, k, v, torch.zeros(1, n_time, dtype=torch.int32) if with_documents else None)
    assert max(kernel.metadata.shared for kernel in compiled) <= 227 * 1024
    assert all("wgmma.mma_async" in kernel.asm["ptx"] for kernel in compiled)
    print(len(compiled), "compiled")


def test_compiles_for_hopper_within_its_shared_memory():
    code = "import tests.test_flash_attention_hopper as test; test.compile_for_hopper()"
    assert "8 compiled" in in_another_process(code, TRITON_INTERPRET="0")


@pytest.mark.parametrize("dtype, head_dim", [(FP32, 64), (BF16, 32)], ids=str)
def test_other_dtypes_and_head_sizes_are_left_to_other_kernels(dtype, head_dim):
    assert not hopper_supports(torch.empty(1, 5, 2, head_dim, dtype=dtype, device=DEVICE))


def assert_as_exact_as_a_16_bit_kernel_can_be(tensors, starts, upstream):
    results = run(flash_attention_hopper, tensors, (starts,), upstream)
    truth = run(attention_oracle, [x.double() for x in tensors], (starts,), [x.double() for x in upstream])
    for name, a, exact in zip(("y", "dq", "dk", "dv"), results, truth, strict=True):
        error = relative_error(a, exact)
        assert error < (6e-3 if a.dtype == BF16 else 1e-3), f"{name}: relative error {error:.1e}"


ROWS = {"whole": None, "documents": [(5, 6, 127, 128, 300), (130, 640), ()]}


@on_hopper
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("n_time", [1, 63, 128, 129, 700])
@pytest.mark.parametrize(
    "dtype, heads, head_dim", [(BF16, (8, 2), 64), (FP16, (2, 2), 64), (BF16, (4, 1), 128)], ids=str
)
def test_forward_and_every_gradient_match_float64(dtype, heads, head_dim, n_time, rows):
    n_head, n_kv_head = heads
    qkv = randn(3, n_time, n_head + 2 * n_kv_head, head_dim, dtype=dtype)  # views of one packed projection
    starts = None
    if rows:
        starts = documents(*([first for first in row if first < n_time] for row in rows), n_time=n_time)
    tensors = qkv.split([n_head, n_kv_head, n_kv_head], dim=2)
    assert_as_exact_as_a_16_bit_kernel_can_be(tensors, starts, [randn(3, n_time, n_head, head_dim, dtype=dtype)])


@on_hopper
@pytest.mark.parametrize("n_time, head_dim", [(4608, 64), (2000, 128)])
def test_more_tiles_than_multiprocessors_and_cudnns_backward(n_time, head_dim):
    tensors = [randn(1, n_time, heads, head_dim, dtype=BF16) for heads in (16, 4, 4)]
    assert_as_exact_as_a_16_bit_kernel_can_be(tensors, None, [randn(1, n_time, 16, head_dim, dtype=BF16)])


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_repeats_bit_for_bit_and_large_scores_stay_finite(head_dim):
    q, k, v = (randn(2, 1500, heads, head_dim, dtype=BF16) for heads in (8, 2, 2))
    y, lse = MODULE._forward(30 * q, 30 * k, v, None)
    assert y.isfinite().all() and lse.isfinite().all()
    for _ in range(5):
        again, lse_again = MODULE._forward(30 * q, 30 * k, v, None)
        assert torch.equal(y, again) and torch.equal(lse, lse_again)


@on_hopper
def test_no_tokens():
    q, k, v = (torch.empty(2, 0, heads, 64, dtype=BF16, device=DEVICE) for heads in (4, 2, 2))
    assert flash_attention_hopper(q, k, v).shape == q.shape
