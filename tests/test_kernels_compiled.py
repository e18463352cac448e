"""The kernels under torch.compile, and within the shared memory of other GPUs."""

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._dynamo.testing import CompileCounterWithBackend

import kernels
from kernels.fp8_linear import empty_rows, quantize, transpose
from kernels.glu import glu_backward, glu_forward
from kernels.rms_norm import rms_norm_forward
from test_kernels import (
    BF16,
    FP16,
    FP32,
    HAS_GPU,
    OPERATIONS,
    arguments_of,
    as_tuple,
    each_operation,
    in_another_process,
    needs_gpu,
    randn,
    relative_error,
    run,
)


def compile_for_new_rows(name, sizes):
    """Compiles once for all row counts, with the same results as uncompiled."""
    torch.compiler.reset()
    function = OPERATIONS[name].function
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for rows in sizes:
        _, inputs, constants, upstream = arguments_of(name, rows, 32)
        leaves = [x.detach().requires_grad_() for x in inputs]
        for x in (*leaves, *constants):
            for dim, size in enumerate(x.shape):
                if size == rows:
                    torch._dynamo.mark_dynamic(x, dim)
        outputs = as_tuple(compiled(*leaves, *constants))
        results = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
        for a, b in zip(results, run(function, inputs, constants, upstream), strict=True):
            assert relative_error(a, b.double()) < 1e-5, f"{name} of {rows} rows"
    assert counter.frame_count == 1, f"{name} compiled {counter.frame_count} times"


@needs_gpu
@each_operation
def test_compiles_into_one_graph(name):
    function, *arguments = arguments_of(name, 6, 64)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True)
    results = run(compiled, *arguments)
    for a, b in zip(results, run(function, *arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    inputs, constants, _ = arguments
    with torch.no_grad():  # an evaluation
        outputs = as_tuple(compiled(*inputs, *constants))
    for a, b in zip(outputs, results, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Custom operators are opaque to the compiler, which therefore accepts even the interpreter's versions.
OPAQUE = ["linear_cross_entropy", "flash_attention", "flash_attention_of_documents"]


@pytest.mark.parametrize("name", OPERATIONS if HAS_GPU else OPAQUE)
def test_compiles_into_one_graph_for_any_number_of_rows(name):
    compile_for_new_rows(name, (300, 500, 257, 3000) if HAS_GPU else (12, 40, 7))


@pytest.mark.skipif(HAS_GPU, reason="the two tests above compile the kernels themselves")
@pytest.mark.parametrize(
    "name", ["rope", "flash_attention_of_documents", "add_norm_mlp_in_chunks", "linear_cross_entropy"]
)
def test_references_compile_into_one_graph_once(name, monkeypatch):
    monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    compile_for_new_rows(name, (12, 40))


def test_the_operator_of_linear_cross_entropy_is_registered_as_pytorch_wants():
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(6, 20, FP32)
    for need_dx, need_dweight in ((True, True), (True, False), (False, True), (False, False)):
        arguments = (x, weight, targets, 4, need_dx, need_dweight, True, x.new_tensor(0.5))
        torch.library.opcheck(torch.ops.nanocria.chunked_loss.default, arguments)


# Compute capability, and the bytes of shared memory available to a program. On Hopper all other tests run the kernels.
CARDS = {"RTX 4090": (89, 101376), "RTX 5090": (120, 101376), "A100": (80, 166912)}


def compile_for(*cards):
    """Compiles the operations' kernels for other GPUs; fails if one does not fit there or fuses a multiply-add.

    Triton needs no GPU for this, only a driver that names one. Nothing runs: results are uninitialized memory.
    """
    launch = triton.runtime.jit.JITFunction.run
    for device, card in enumerate(cards):
        compile_on(device, card, launch)


def compile_on(device, card, launch):
    """device: Triton keeps what it compiled for one."""
    capability, shared = CARDS[card]
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: device, get_current_stream=lambda device: 0, get_current_target=lambda: target,
        )
    )  # fmt: skip
    names = set()
    fused = set()

    def compile_only(kernel, *arguments, warmup, **options):
        compiled = launch(kernel, *arguments, warmup=True, **options)
        size = compiled.metadata.shared
        assert size <= shared, f"{kernel.__name__} takes {size} bytes of shared memory, {card} has {shared}"
        names.add(kernel.__name__)
        if "fma.rn.f32" in compiled.asm["ptx"]:
            fused.add(kernel.__name__)

    triton.runtime.jit.JITFunction.run = compile_only
    for module in [module for name, module in sys.modules.items() if name.startswith("kernels.")]:
        for name, value in (("use_triton", lambda x: True), ("shared_memory", lambda x: shared)):
            if hasattr(module, name):
                setattr(module, name, value)
    for name in OPERATIONS:  # in half precision a tile has as many bytes, and more rows to reduce; attention: below
        run(OPERATIONS[name].function, *OPERATIONS[name].inputs(6, 256, FP32 if "attention" in name else FP16))
    for head_dim, dtype in product((64, 128), (FP16, FP32)):
        run(kernels.flash_attention, [randn(1, 256, heads, head_dim, dtype=dtype) for heads in (4, 2, 2)])
        q, k, cache = (randn(1, n, heads, head_dim, dtype=dtype) for n, heads in ((1, 16), (1, 4), (300, 4)))
        kernels.decode_attention(q, k, k, cache, cache, torch.zeros(1, dtype=torch.int64))
    if capability >= 89:  # before Ada there is no float8
        x = torch.ones(64, 256, dtype=BF16)
        x8, scales = quantize(x)
        quantize(x[:, :64].contiguous(), scales.view(-1))
        transpose(x8)
        rms_norm_forward(x, x, x[0], 1e-5, float8=True)
        glu_forward(x, "silu", float8=True)
        with torch.no_grad():
            glu_backward(x, torch.cat([x, x], 1), "silu", True, torch.ones(512))
        w8, t = empty_rows((64, 14336), x, float8=True)
        for out in (w8, w8.view(14336, 64).T):
            kernels.fp8_lora_linear.nf4_to_float8(*kernels.quantize_nf4(torch.ones(w8.shape, dtype=BF16)), out, t)
        for rank in (3, 80):
            kernels.add_low_rank(x, x[:, :rank], torch.ones(rank, 200, dtype=BF16).T, 8)
    bf16 = torch.ones(700, dtype=BF16)
    half = torch.ones(700, dtype=torch.int16)
    codes = torch.ones(700, dtype=torch.uint8)
    absmax = torch.ones(3)
    kernels.adamw8bit(bf16, bf16, half, codes, codes, absmax, absmax, torch.ones(4), 0.9, 0.95, 1e-8, 0.1)
    kernels.dequantize_nf4(kernels.quantize_nf4(torch.ones(32, 512, dtype=BF16)))
    few_bits = {name for name in names if "nf4" in name or "8bit" in name}
    assert len(few_bits) == 2 + (capability >= 89)
    assert not few_bits & fused, "rounds a product and what is added to it once: other bits than elsewhere"
    print(len(names), "fit")


@pytest.mark.parametrize("cards", [[*CARDS][:1], pytest.param([*CARDS][1:], marks=pytest.mark.slow)], ids=str)
def test_kernels_fit_the_shared_memory_and_those_of_few_bits_round_a_product_before_they_add_to_it(cards):
    """The interpreter never fuses, so it cannot test this."""
    code = f"import tests.test_kernels_compiled as test; test.compile_for(*{cards!r})"
    assert in_another_process(code, TRITON_INTERPRET="0").count(" fit") == len(cards)
