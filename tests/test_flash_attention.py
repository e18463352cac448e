"""What flash_attention promises beyond what test_kernels.py tests for all operations: masks, blocks, documents.

Small blocks here, so that a few tokens cross several of them in each direction.
"""

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.flash_attention import flash_attention
from test_kernels import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    FP64,
    Operation,
    assert_matches_float64,
    assert_same,
    attention_oracle,
    documents,
    full_size,
    randn,
    relative_error,
    run,
    widened,
)

MODULE = importlib.import_module("kernels.flash_attention")  # `kernels.flash_attention` may be the function


def inputs(n_time, heads=(4, 2), head_dim=16, dtype=FP32, n_batch=2):
    """q, k and v as views of one packed projection, and a gradient of y."""
    n_head, n_kv_head = heads
    qkv = randn(n_batch, n_time, n_head + 2 * n_kv_head, head_dim, dtype=dtype)
    q, k, v = qkv.split([n_head, n_kv_head, n_kv_head], dim=2)
    return (q, k, v), [randn(*q.shape, dtype=dtype)]


def assert_exact(rows, n_time, heads=(2, 1), head_dim=16, dtype=FP32):
    """Against float64; rows: where each row's documents begin."""
    tensors, upstream = inputs(n_time, heads, head_dim, dtype, n_batch=len(rows) if rows else 2)
    starts = (documents(*rows, n_time=n_time),) if rows else ()
    assert_matches_float64(Operation(flash_attention, attention_oracle), tensors, starts, upstream)


# ---------------------------------------------------------------------------------------------------------------------
# Right numbers


DOCUMENTS = {"whole": None, "documents": [(5, 6, 32, 33), (17, 48, 66)]}
CASES = [(FP32, (4, 1), 16), (FP64, (2, 1), 128), (FP16, (2, 2), 64), (BF16, (8, 2), 32), (BF16, (2, 1), 128)]


@pytest.mark.parametrize("n_time, dtype, heads, head_dim", [
    *((70, *case) for case in CASES),
    *((n_time, FP32, (2, 1), 16) for n_time in (31, 32, 100)),  # test_kernels.py has others
], ids=str)  # fmt: skip
def test_forward_and_every_gradient_match_float64(n_time, dtype, heads, head_dim):
    assert_exact(DOCUMENTS["documents"], n_time, heads, head_dim, dtype)


@pytest.mark.parametrize("rows", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("blocks", [(32, 64), (64, 16)], ids=str)
def test_any_shape_of_blocks(blocks, rows, monkeypatch):
    monkeypatch.setattr(MODULE, "FALLBACK", (*blocks, 4, 2, None))
    assert_exact(rows, 70)


def test_blocks_of_other_documents_are_never_read():
    """NaN times 0 is NaN: values that are read and then masked would show."""
    tensors, upstream = inputs(128, (2, 1))
    starts = documents((32, 64, 96), (64,), n_time=128)
    clean = run(flash_attention, tensors, (starts,), upstream)
    for x in (*tensors, *upstream):
        x[0, :32] = x[0, 64:96] = float("nan")
    results = run(flash_attention, tensors, (starts,), upstream)
    for name, out, expected in zip(("y", "dq", "dk", "dv"), results, clean, strict=True):
        for batch, part in ((0, slice(32, 64)), (0, slice(96, 128)), (1, slice(None))):
            assert_same([out[batch, part]], [expected[batch, part]], f"{name} of row {batch}, {part}")


def test_large_scores_do_not_overflow():
    (q, k, v), upstream = inputs(40, (2, 1))
    q = 1e4 * q
    k = 1e4 * k
    y, *gradients = run(flash_attention, (q, k, v), (), upstream)
    truth = run(attention_oracle, widened((q, k, v)), (), widened(upstream))
    torch.testing.assert_close(y.double(), truth[0], rtol=1e-2, atol=1e-2)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_saved_tensors_may_return_to_backward_in_another_layout():
    """As torch.autograd.graph.save_on_cpu and offload wrappers return it."""
    tensors, upstream = inputs(38)
    expected = run(flash_attention, tensors, (), upstream)
    dense = torch.contiguous_format
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(memory_format=dense), lambda x: x):
        assert_same(run(flash_attention, tensors, (), upstream), expected, "packed")


# ---------------------------------------------------------------------------------------------------------------------
# Full size, 16 bits


SIZES = [(8, 2048, (32, 8), 64), (2, 8192, (32, 8), 64), (4, 4096, (32, 8), 128), (3, 1999, (24, 8), 128)]


@full_size
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("n_batch, n_time, heads, head_dim", SIZES)
def test_full_size_is_as_exact_as_pytorchs_own(n_batch, n_time, heads, head_dim, dtype):
    """At most 1.2 times the error of flash attention in PyTorch, on one key/value head and its group."""
    tensors, upstream = inputs(n_time, heads, head_dim, dtype, n_batch)
    ours = run(flash_attention, tensors, (), upstream)

    def theirs(*qkv):
        q, k, v = (x.transpose(1, 2) for x in qkv)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    flash = run(theirs, tensors, (), upstream)
    group = heads[0] // heads[1]
    kv_head = heads[1] - 2
    shared = slice(kv_head * group, (kv_head + 1) * group)
    own = slice(kv_head, kv_head + 1)
    q, k, v = (x[-1:, :, part].double() for x, part in zip(tensors, (shared, own, own), strict=True))
    truth = run(attention_oracle, (q, k, v), (), [upstream[0][-1:, :, shared].double()])
    unit = torch.finfo(dtype).eps / 2
    parts = (shared, shared, own, own)
    for name, a, b, exact, part in zip(("y", "dq", "dk", "dv"), ours, flash, truth, parts, strict=True):
        error = relative_error(a[-1:, :, part], exact)
        limit = 1.2 * relative_error(b[-1:, :, part], exact) + unit
        assert error <= limit, f"{name}: relative error {error:.3e} over the limit {limit:.3e}"


@full_size
@pytest.mark.parametrize("head_dim", [64, 128])
def test_documents_at_full_size(head_dim):
    """The documents of a packed row, some longer and some shorter than any block, against each run alone."""
    firsts = [0, 1, 130, 700, 3000, 3001, 4095, 4099]
    tensors, upstream = inputs(4099, (32, 8), head_dim, BF16, n_batch=1)
    together = run(flash_attention, tensors, (documents(firsts[1:-1], n_time=4099),), upstream)
    for first, end in zip(firsts, firsts[1:], strict=False):
        if end - first > 1:
            q, k, v = ((x[:, first:end]).double() for x in tensors)
            truth = run(attention_oracle, (q, k, v), (), [upstream[0][:, first:end].double()])
            for name, a, b in zip(("y", "dq", "dk", "dv"), together, truth, strict=True):
                error = relative_error(a[:, first:end], b)
                assert error < 6e-3, f"{name}, document at {first}: relative error {error:.3e}"


@full_size
def test_past_2_to_the_31_elements():
    n_time = 2**20 + 77
    document = 128
    tensors, upstream = inputs(n_time, (32, 8), 64, BF16, n_batch=1)
    time = torch.arange(n_time, device=DEVICE)
    results = run(flash_attention, tensors, ((time // document * document)[None],), upstream)
    assert results[0].numel() > 2**31
    last = slice(n_time // document * document - document, None)
    tail = [x[:, last] for x in tensors]
    starts = (torch.arange(tail[0].shape[1], device=DEVICE) // document * document)[None]
    for a, b in zip(results, run(flash_attention, tail, (starts,), [upstream[0][:, last]]), strict=True):
        torch.testing.assert_close(a[:, last], b, rtol=0.02, atol=0.02)


def test_compiled_code_takes_the_search_for_flash_attention_4_as_a_constant(monkeypatch):
    module = importlib.import_module("kernels.attention")
    monkeypatch.setattr(module, "_activate_flash_attention_4", lambda: not Path("/dev/null").read_bytes())

    @torch.compile(fullgraph=True, backend="eager")  # which cannot read files
    def chosen(x):
        return x + module.activate_flash_attention_4()

    assert chosen(torch.zeros(())) == 1
