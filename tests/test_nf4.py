"""NF4 weights: the kernels beside their reference, and both beside bitsandbytes, bit for bit.

Where bitsandbytes is installed, its own codes are compared; its fixtures are here for where it is not.
"""

import hashlib
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from kernels import NF4, block_absmax, dequantize_nf4, quantize_nf4, reference
from test_kernels import full_size
from tests.runs import ROOT

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BF16, FP32, UINT8 = torch.bfloat16, torch.float32, torch.uint8
adamw8bit_file = sys.modules["kernels.adamw8bit"]  # the package's attribute of that name is the function
nf4_file = sys.modules["kernels.nf4"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, on inf and NaN


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_same_bits(ours, theirs, what=""):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what} {i}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        differ = (a.reshape(-1).view(UINT8) != b.reshape(-1).view(UINT8)).sum()
        assert not differ, f"{what} {i}: {differ} of {a.nbytes} bytes differ"


def digest(x):
    return hashlib.sha256(x.cpu().reshape(-1).view(UINT8).numpy().tobytes()).hexdigest()[:16]


def bitsandbytes_functional():
    return pytest.importorskip("bitsandbytes.functional")


def patterned_weight(n, dtype, device=DEVICE):
    """Without a random generator, and with absmax whose sum is exact in any order: the same on every machine."""
    i = torch.arange(n, device=device)
    return (((i * 7919) % 1009 - 504) * (1 + (i // 64) * 11 % 37) / 65536).to(dtype)


# From bitsandbytes 0.50.2 on a CPU: quantize_4bit(weight, compress_statistics=True, quant_type="nf4"), dequantize_4bit
SMALL_CODES = (
    "0ec8521fda7410ec9531fdb7420eda631feb8521fda7310ec9521fdb7420ed9631feb8520fda6310ec9521fdb7420ed9"
    "631feb8420fda6310ec9521fdb7410ec9631feb8420eda6310ec8521fdb7410ec9631feb8420eda6310ec8521fdb7410"
    "ec9631feb8420eda6310ec8521fda7410ec9531fdb7420eda6310ec8521fda74"
)
DIGESTS = {  # of codes, scale_codes, scale_absmax, offset and what is read back, for 32,768 weights
    BF16: ["f2f3c5dc4f247796", "377650f5436dd07e", "0379910df3ea4e9b", "20db5ff93ec2f8c1", "7d98504f2f6e32d4"],
    FP32: ["ecde248929b320e4", "914752270b3601d8", "c3a0f69103fb6c6a", "94389299fc8b7353", "2cd33299ab16a267"],
}
NF4S = {"kernel": (quantize_nf4, dequantize_nf4), "reference": (reference.quantize_nf4, reference.dequantize_nf4)}
each_nf4 = pytest.mark.parametrize("quantize, dequantize", NF4S.values(), ids=NF4S)


@each_nf4
def test_nf4_has_the_bits_of_bitsandbytes(quantize, dequantize):
    small = quantize(patterned_weight(256, BF16).view(2, 128))
    assert bytes(small.codes.view(-1).tolist()).hex() == SMALL_CODES
    assert small.codes.shape == (2, 64) and small.scale_codes.tolist() == [1, 47, 206, 255]
    assert small.scale_absmax.tolist() == [float.fromhex("0x1.069p-3")]
    assert small.offset.item() == float.fromhex("0x1.117p-3")
    for dtype, expected in DIGESTS.items():
        weight = quantize(patterned_weight(2**15, dtype).view(8, -1))
        found = [digest(x) for x in weight]
        assert found == expected[:4], f"{dtype}: {found}"
        # The interpreter does not round to bf16, but cuts off: there the exact product is compared, and rounded here
        back = dequantize(weight, torch.empty(8, 4096, dtype=FP32, device=DEVICE)).to(dtype)
        assert digest(back) == expected[4]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_nf4_is_that_of_bitsandbytes(dtype):
    functional = bitsandbytes_functional()
    weight = (0.02 * torch.randn(300, 192)).to(dtype)
    weight[3], weight[5, :64] = 0, 1e-30
    ours = reference.quantize_nf4(weight)
    codes, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    theirs = codes.view(300, 96), state.absmax, state.state2.absmax, state.offset
    assert_same_bits([ours.codes, *ours[2:]], [theirs[0], *theirs[2:]])
    # On a CPU it looks scales up in a coarser table: next to a bound it may take the neighbour
    differ = (ours.scale_codes.int() - theirs[1].int()).abs()
    assert differ.max() <= 1 and (differ > 0).float().mean() < 0.02
    state.absmax = ours.scale_codes
    back = reference.dequantize_nf4(ours, torch.empty_like(weight))
    assert_same_bits([back], [functional.dequantize_4bit(codes, state)])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (37, 192), (2, 32, 66)], ids=str)
def test_nf4_kernels_are_the_reference_bit_for_bit(shape, dtype):
    weight = (0.02 * torch.randn(shape, device=DEVICE)).to(dtype)
    ours, plain = quantize_nf4(weight), reference.quantize_nf4(weight)
    assert_same_bits(ours, plain)
    outs = [torch.empty(shape, dtype=FP32, device=DEVICE) for _ in range(2)]
    assert_same_bits([dequantize_nf4(ours, outs[0])], [reference.dequantize_nf4(plain, outs[1])])
    back = dequantize_nf4(ours)
    assert back.dtype == BF16 and back.shape == shape
    if HAS_GPU:
        assert_same_bits([back], [outs[1].to(BF16)])
    else:  # the interpreter cuts off
        torch.testing.assert_close(back.float(), outs[1], rtol=2**-7, atol=0)


def test_nf4_costs_a_normal_weight_nine_percent():
    weight = 0.02 * torch.randn(256, 512, device=DEVICE)
    out = torch.empty_like(weight)
    error = (dequantize_nf4(quantize_nf4(weight), out) - weight).norm() / weight.norm()
    assert 0.08 < error < 0.1, f"{error:.4f}"


@each_nf4
def test_nf4_keeps_zeros_and_shows_a_nan(quantize, dequantize):
    weight = 0.02 * torch.randn(8, 128, device=DEVICE)
    weight[2], weight[3, :64] = 0, 1e-39
    assert (dequantize(quantize(weight))[2] == 0).all()
    weight[7, 100] = float("nan")
    assert dequantize(quantize(weight)).isnan().all()


def test_nf4_of_each_ranks_rows_is_that_of_the_whole_weight():
    weight = 0.02 * torch.randn(24, 2048, device=DEVICE)
    whole = quantize_nf4(weight)
    offset = torch.cat([block_absmax(rows) for rows in weight.chunk(3)]).mean()
    shards = [quantize_nf4(rows, offset) for rows in weight.chunk(3)]  # 8 rows: 16,384 elements
    assert_same_bits([torch.cat(parts) for parts in list(zip(*shards, strict=True))[:3]], whole[:3])
    assert torch.equal(offset, whole.offset)
    # Other rows than these begin blocks of scales of their own: the codes are the same, and each reads back its rows
    uneven = [quantize_nf4(rows, offset) for rows in weight.split([5, 19])]
    assert torch.equal(torch.cat([part.codes for part in uneven]), whole.codes)
    back = torch.cat([dequantize_nf4(part) for part in uneven]).float()
    assert (back - dequantize_nf4(whole).float()).norm() / weight.norm() < 0.01


def test_nf4_parts_may_be_viewed_by_rows():
    whole = quantize_nf4(0.02 * torch.randn(8, 4096, device=DEVICE))
    by_rows = NF4(whole.codes, whole.scale_codes.view(8, -1), whole.scale_absmax, whole.offset)
    for quantized in (by_rows, by_rows._replace(offset=whole.offset.view(1))):
        assert_same_bits([dequantize_nf4(quantized)], [dequantize_nf4(whole)])


def test_nf4_refuses_what_has_no_whole_blocks():
    for shape, message in (((3, 32), "96 elements"), ((64, 3), "an even last dimension"), ((0, 64), "0 elements")):
        for function in (quantize_nf4, block_absmax):
            with pytest.raises(ValueError, match=message):
                function(torch.ones(shape, device=DEVICE))
    with pytest.raises(ValueError, match="strides"):
        quantize_nf4(torch.ones(64, 4, device=DEVICE).T)
    whole = quantize_nf4(torch.ones(4, 64, device=DEVICE))
    for parts, out in (
        (whole._replace(scale_codes=whole.scale_codes[:2]), None),
        (whole._replace(codes=whole.codes[:, :16]), None),
        (whole, torch.empty(4, 32, device=DEVICE)),
        (whole, torch.empty(64, 4, device=DEVICE).T),
    ):
        with pytest.raises(ValueError, match="expected .* contiguous"):
            dequantize_nf4(parts, out)


def test_nf4_compiles_into_one_graph():
    weight = quantize_nf4(0.02 * torch.randn(4, 64, device=DEVICE))
    out = torch.empty(4, 64, dtype=BF16, device=DEVICE)
    torch.library.opcheck(torch.ops.nanocria.dequantize_nf4.default, (*weight, out))
    x = torch.randn(2, 64, device=DEVICE)

    def project(x, weight):
        return x @ dequantize_nf4(weight).to(x.dtype).T

    compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), project(x, weight))


@full_size
def test_nf4_needs_no_temporary_as_large_as_the_weight():
    weight = torch.randn(8192, 4096, device=DEVICE, dtype=BF16)
    quantize_nf4(weight[:64])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    quantized = quantize_nf4(weight)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < weight.nbytes, f"{peak / weight.nbytes:.2f} of the weight"
    held = sum(x.nbytes for x in quantized)
    assert abs(held / weight.numel() - 0.516) < 0.001, f"{held / weight.numel():.4f} bytes an element"


@full_size
def test_nf4_past_2_to_the_31_elements():
    n = 2**31 + 64 * 100
    weight = torch.ones(n, dtype=BF16, device=DEVICE)
    weight[-64:] = 3
    quantized = quantize_nf4(weight)
    back = dequantize_nf4(quantized, out=weight)
    assert (back[-64:].float() - 3).abs().max() < 0.05 and (back[:64].float() - 1).abs().max() < 0.05


COMPILE = """
import sys
from types import SimpleNamespace
import torch, triton
import kernels
target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0,
                                                 get_current_target=lambda: target))
launch = triton.runtime.jit.JITFunction.run

def compile_only(kernel, *arguments, warmup, **options):
    compiled = launch(kernel, *arguments, warmup=True, **options)
    print(kernel.__name__, "fused" if "fma.rn.f32" in compiled.asm["ptx"] else "twice", compiled.metadata.shared)

triton.runtime.jit.JITFunction.run = compile_only
sys.modules["kernels.nf4"].use_triton = lambda x: True
weight = kernels.quantize_nf4(torch.ones(32, 512, dtype=torch.bfloat16))
kernels.dequantize_nf4(weight)
"""


def test_nf4_for_a_gpu_rounds_a_product_before_it_adds_to_it():
    """Triton compiles for a GPU that is not here; the interpreter, which never fuses, could not tell."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    run = partial(subprocess.run, capture_output=True, text=True, env=environment, cwd=ROOT)
    done = run([sys.executable, "-c", COMPILE])
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert set(lines) == {"_quantize_nf4_kernel", "_dequantize_nf4_kernel"}, done.stdout
    assert all("twice" in line for line in lines.values()), done.stdout
