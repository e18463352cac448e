"""flash_attention against float64, held to the numbers of test_kernels.py, whose means of comparison these are.

    pytest test_flash_attention.py                          no GPU: through Triton's interpreter, about a minute
    pytest test_flash_attention.py -n 8 --dist loadgroup    on a GPU: natively, and again at full size

Small blocks here, so that a few tokens cross several of them in each direction.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kernels.flash_attention import flash_attention, flash_attention_reference
from test_kernels import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    FP64,
    HAS_GPU,
    assert_close,
    assert_same,
    full_size,
    needs_gpu,
    poisoned,
    randn,
    relative_error,
    reversed_dimensions,
    run,
    seed,  # noqa: F401
    spread_columns,
    spread_rows,
    widened,
    written_outside,
)

MODULE = importlib.import_module("kernels.flash_attention")  # `kernels.flash_attention` may be the function
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, on NaN


def inputs(n_time, heads=(4, 2), head_dim=16, dtype=FP32, n_batch=2):
    """q, k and v as views of one packed projection, and a gradient of y."""
    n_head, n_kv_head = heads
    qkv = randn(n_batch, n_time, n_head + 2 * n_kv_head, head_dim, dtype=dtype)
    q, k, v = qkv.split([n_head, n_kv_head, n_kv_head], dim=2)
    return (q, k, v), [randn(*q.shape, dtype=dtype)]


def documents(*rows, n_time):
    """starts (B, T) of rows of documents, each given by its documents' first positions (0 goes without saying)."""
    time = torch.arange(n_time, device=DEVICE)
    firsts = [torch.tensor([0, *row], device=DEVICE) for row in rows]
    return torch.stack([first[torch.searchsorted(first, time, right=True) - 1] for first in firsts])


def oracle(q, k, v, starts=None):
    wide = torch.promote_types(q.dtype, FP32)
    group, time = q.shape[2] // k.shape[2], torch.arange(q.shape[1], device=q.device)
    k, v = (x.to(wide).repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.to(wide), k) / q.shape[3] ** 0.5
    hidden = time > time[:, None]
    if starts is not None:
        hidden = hidden | (time < starts[:, None, :, None])
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", p, v).to(q.dtype)


def assert_matches_float64(function, tensors, upstream, starts=None):
    ours = run(function, tensors, (starts,), upstream)
    eager = run(oracle, tensors, (starts,), upstream)
    truth = run(oracle, widened(tensors), (starts,), widened(upstream))
    for name, out, exact, rounded in zip(("y", "dq", "dk", "dv"), ours, truth, eager, strict=True):
        assert_close(name, out, exact, rounded)


# ---------------------------------------------------------------------------------------------------------------------
# Right numbers


DOCUMENTS = {"whole": None, "documents": [(5, 6, 32, 33), (17, 48)]}
each_documents = pytest.mark.parametrize("rows", DOCUMENTS.values(), ids=DOCUMENTS)


CASES = [
    (FP64, (4, 1), 16), (FP32, (8, 2), 32), (FP32, (2, 1), 128), (FP16, (2, 2), 64), (FP16, (2, 1), 128),
    (BF16, (4, 1), 16), (BF16, (8, 2), 32), (BF16, (4, 2), 64), (BF16, (2, 1), 128),
]  # fmt: skip


@each_documents
@pytest.mark.parametrize("dtype, heads, head_dim", CASES, ids=str)
def test_forward_and_every_gradient_match_float64(dtype, heads, head_dim, rows):
    tensors, upstream = inputs(70, heads, head_dim, dtype, n_batch=2 if heads[0] < 8 else 1)
    starts = rows and documents(*rows[: len(tensors[0])], n_time=70)
    assert_matches_float64(flash_attention, tensors, upstream, starts)


@pytest.mark.parametrize("n_time", [2, 16, 31, 32, 33, 64, 65])
def test_any_number_of_tokens(n_time):
    tensors, upstream = inputs(n_time, (2, 1))
    assert_matches_float64(flash_attention, tensors, upstream)
    assert_matches_float64(flash_attention, tensors, upstream, documents((1,), (n_time // 2,), n_time=n_time))


@each_documents
@pytest.mark.parametrize("blocks", [(32, 32), (32, 64), (64, 16), (64, 64)], ids=str)
def test_any_shape_of_blocks(blocks, rows, monkeypatch):
    monkeypatch.setattr(MODULE, "FALLBACK", (*blocks, 4, 2, None))
    tensors, upstream = inputs(70, (2, 1))
    assert_matches_float64(flash_attention, tensors, upstream, rows and documents(*rows, n_time=70))


def test_the_first_token_sees_itself_alone():
    tensors, upstream = inputs(1, (2, 1))
    y, dq, dk, dv = run(flash_attention, tensors, (), upstream)
    torch.testing.assert_close(y, tensors[2].expand_as(y))
    torch.testing.assert_close(dv, upstream[0].sum(2, keepdim=True))
    assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5, "a softmax over one score has no gradient"


def test_each_document_is_attention_run_alone_on_it():
    firsts = (0, 1, 17, 40, 64, 70)
    tensors, upstream = inputs(70, dtype=FP64, n_batch=1)
    together = run(flash_attention, tensors, (documents(firsts[1:-1], n_time=70),), upstream)
    for first, end in zip(firsts, firsts[1:], strict=False):
        alone = run(flash_attention, [x[:, first:end] for x in tensors], (), [upstream[0][:, first:end]])
        for name, a, b in zip(("y", "dq", "dk", "dv"), together, alone, strict=True):
            torch.testing.assert_close(a[:, first:end], b, msg=lambda m, n=name, f=first: f"{n}, document at {f}: {m}")


def test_no_token_reads_a_later_one():
    (q, k, v), _ = inputs(70)
    before = flash_attention(q, k, v)
    for x in (q, k, v):
        x[:, 50:] += 3
    assert_same([flash_attention(q, k, v)[:, :50]], [before[:, :50]], "tokens before 50")


def test_blocks_of_other_documents_are_never_read():
    """NaN times 0 is NaN: what is only masked would show."""
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
    for size in (1e2, 1e4):
        y, dq, dk, dv = run(flash_attention, (size * q, size * k, v), (), upstream)
        truth = run(oracle, widened((size * q, size * k, v)), (), widened(upstream))
        torch.testing.assert_close(y.double(), truth[0], rtol=1e-2, atol=1e-2)
        assert all(g.isfinite().all() for g in (dq, dk, dv)), f"scores of {size**2:.0e}"


@each_documents
def test_gradcheck_in_float64(rows):
    tensors, _ = inputs(18, (2, 1), dtype=FP64, n_batch=1)
    starts = rows and documents(rows[1][:1], n_time=18)
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *leaves: flash_attention(*leaves, starts), leaves, fast_mode=True)


@each_documents
@pytest.mark.parametrize("dtype", [FP64, FP32, FP16], ids=str)
def test_the_reference_matches_float64_too(dtype, rows):
    tensors, upstream = inputs(70, dtype=dtype)
    assert_matches_float64(flash_attention_reference, tensors, upstream, rows and documents(*rows, n_time=70))


# ---------------------------------------------------------------------------------------------------------------------
# Any strides, any documents


def shifted(x):
    """Off the 16-byte boundaries that the copy engine wants."""
    wider = poisoned(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return wider.copy_(x)


@pytest.mark.parametrize("restride", [spread_rows, spread_columns, reversed_dimensions, shifted])
def test_strides_of_inputs_and_gradients_change_nothing(restride):
    tensors, upstream = inputs(40, (2, 1))
    packed = run(flash_attention, [x.contiguous() for x in tensors], (), upstream)
    ours = run(flash_attention, [restride(x) for x in tensors], (), [restride(g) for g in upstream])
    assert_same(ours, packed, restride.__name__)
    assert all(x.is_contiguous() for x in ours)


def test_gradients_and_inputs_of_stride_0():
    tensors, _ = inputs(40, (2, 1))
    one = torch.ones((), device=DEVICE)
    expanded = run(flash_attention, tensors, (), [one.expand(2, 40, 2, 16)])
    assert_same(expanded, run(flash_attention, tensors, (), [torch.ones(2, 40, 2, 16, device=DEVICE)]), "a sum's")
    q, k, v = (x[:1, :, :1].expand(2, 40, 2, 16) for x in tensors)
    assert_same([flash_attention(q, k, v)], [flash_attention(q.clone(), k.clone(), v.clone())], "expanded inputs")


def test_starts_of_any_integer_type_and_stride():
    tensors, upstream = inputs(40, (2, 1))
    starts = documents((5, 32), (17,), n_time=40)
    expected = run(flash_attention, tensors, (starts,), upstream)
    for other in (starts.int(), starts.to(torch.int16), starts.T.contiguous().T):
        assert_same(run(flash_attention, tensors, (other,), upstream), expected, f"{other.dtype} {other.stride()}")
    shared = starts[:1].expand(2, 40)
    copied = run(flash_attention, tensors, (shared.contiguous(),), upstream)
    assert_same(run(flash_attention, tensors, (shared,), upstream), copied, "one row of starts for all")


@pytest.mark.parametrize("shape", [(0, 40), (2, 0)], ids=str)
def test_no_tokens_give_empty_results(shape):
    (q, k, v), _ = inputs(shape[1], n_batch=shape[0])
    results = run(flash_attention, (q, k, v), (), [torch.empty_like(q)])
    assert [x.shape for x in results] == [q.shape, q.shape, k.shape, v.shape]


def test_nothing_is_written_outside_the_results(monkeypatch):
    tensors, upstream = inputs(37, (2, 1))
    written = written_outside(monkeypatch, flash_attention, tensors, (), upstream)
    assert len(written) == 6, "y, lse, dq, dk, dv and delta: the kernels allocate in another way now"
    assert not any(written), f"something wrote past the end of a buffer: {written}"


# ---------------------------------------------------------------------------------------------------------------------
# What autograd, the compiler and the machine may ask


def test_two_runs_are_equal_bit_for_bit():
    tensors, upstream = inputs(2000 if HAS_GPU else 70, (4, 2), 64, BF16 if HAS_GPU else FP32)
    first, *others = (run(flash_attention, tensors, (), upstream) for _ in range(5 if HAS_GPU else 2))
    for other in others:
        assert_same(other, first, "flash_attention")


def test_a_second_derivative_is_refused_rather_than_wrong():
    leaves = [x.detach().requires_grad_() for x in inputs(5)[0]]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(flash_attention(*leaves).sum(), leaves, create_graph=True)


def test_backward_twice_gives_the_same_gradients_and_overwrites_nothing():
    tensors, upstream = inputs(40)
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    y = flash_attention(*leaves)
    kept = [x.detach().clone() for x in (*leaves, y, *upstream)]
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    first_kept = [g.clone() for g in first]
    assert_same(torch.autograd.grad(y, leaves, upstream), first_kept, "the second backward:")
    assert_same([*first, *leaves, y, *upstream], [*first_kept, *kept], "something was overwritten:")


@pytest.mark.parametrize("needed", ["q", "k", "v", "qk", "qv", "kv"])
def test_a_frozen_input_gets_no_gradient_and_no_kernel(needed, monkeypatch):
    tensors, upstream = inputs(40, (2, 1))
    full = dict(zip("qkv", run(flash_attention, tensors, (), upstream)[1:], strict=True))
    leaves = {name: x.detach().requires_grad_(name in needed) for name, x in zip("qkv", tensors, strict=True)}
    y = flash_attention(**leaves)
    if needed == "q":
        monkeypatch.setattr(MODULE, "_flash_dkv_kernel", None)
    y.backward(upstream[0])
    for name, leaf in leaves.items():
        if name in needed:
            assert_same([leaf.grad], [full[name]], f"gradient of {name}, needed {needed}:")
        else:
            assert leaf.grad is None


def test_activation_checkpointing_gives_the_same_gradients():
    tensors, upstream = inputs(40)
    plain = run(flash_attention, tensors, (), upstream)
    assert_same(run(lambda *x: checkpoint(flash_attention, *x, use_reentrant=False), tensors, (), upstream), plain, "")


def test_selective_checkpointing_can_keep_y_and_skip_the_second_forward(monkeypatch):
    tensors, upstream = inputs(40)
    plain = run(flash_attention, tensors, (), upstream)
    kept = torch.ops.nanocria.flash_attention.default

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == kept else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = [x.detach().requires_grad_() for x in tensors]
    context = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    y = checkpoint(flash_attention, *leaves, use_reentrant=False, **context)
    monkeypatch.setattr(MODULE, "_flash_fwd_kernel", None)  # a second forward would fail
    assert_same([y, *torch.autograd.grad(y, leaves, upstream)], plain, "selective checkpointing")


@needs_gpu
@each_documents
def test_compiles_into_one_graph(rows):
    tensors, upstream = inputs(70, dtype=BF16, head_dim=64)
    starts = rows and documents(*rows, n_time=70)
    torch.compiler.reset()
    compiled = torch.compile(flash_attention, fullgraph=True)
    assert_same(
        run(compiled, tensors, (starts,), upstream), run(flash_attention, tensors, (starts,), upstream), "compiled"
    )


@needs_gpu
@each_documents
def test_a_captured_cuda_graph_replays_on_new_inputs(rows):
    tensors, upstream = inputs(70, dtype=BF16, head_dim=64)
    starts = rows and documents(*rows, n_time=70)
    leaves = [x.detach().clone().requires_grad_() for x in tensors]

    def step():
        y = flash_attention(*leaves, starts)
        return y, *torch.autograd.grad(y, leaves, upstream)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.normal_()
    graph.replay()
    assert_same(captured, step(), "replayed")


@needs_gpu
def test_forward_and_backward_never_wait_for_the_gpu():
    tensors, upstream = inputs(70, dtype=BF16, head_dim=64)
    starts = documents(*DOCUMENTS["documents"], n_time=70)
    run(flash_attention, tensors, (starts,), upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(flash_attention, tensors, (starts,), upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    group, kv_head = heads[0] // heads[1], heads[1] - 2
    shared, own = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
    q, k, v = (x[-1:, :, part].double() for x, part in zip(tensors, (shared, own, own), strict=True))
    truth = run(oracle, (q, k, v), (), [upstream[0][-1:, :, shared].double()])
    unit = torch.finfo(dtype).eps / 2
    parts = (shared, shared, own, own)
    for name, a, b, exact, part in zip(("y", "dq", "dk", "dv"), ours, flash, truth, parts, strict=True):
        error, limit = relative_error(a[-1:, :, part], exact), 1.2 * relative_error(b[-1:, :, part], exact) + unit
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
            truth = run(oracle, (q, k, v), (), [upstream[0][:, first:end].double()])
            for name, a, b in zip(("y", "dq", "dk", "dv"), together, truth, strict=True):
                error = relative_error(a[:, first:end], b)
                assert error < 6e-3, f"{name}, document at {first}: relative error {error:.3e}"


@full_size
def test_past_2_to_the_31_elements():
    n_time, document = 2**20 + 77, 128
    tensors, upstream = inputs(n_time, (32, 8), 64, BF16, n_batch=1)
    time = torch.arange(n_time, device=DEVICE)
    results = run(flash_attention, tensors, ((time // document * document)[None],), upstream)
    assert results[0].numel() > 2**31
    last = slice(n_time // document * document - document, None)
    tail = [x[:, last] for x in tensors]
    starts = (torch.arange(tail[0].shape[1], device=DEVICE) // document * document)[None]
    for a, b in zip(results, run(flash_attention, tail, (starts,), [upstream[0][:, last]]), strict=True):
        torch.testing.assert_close(a[:, last], b, rtol=0.02, atol=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize("n_time", [32, 38])
def test_what_backward_needs_may_come_back_in_another_layout(n_time):
    """As torch.autograd.graph.save_on_cpu and offload wrappers return it."""
    tensors, gradients = inputs(n_time)
    expected = run(flash_attention, tensors, (), gradients)
    dense = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
    )
    with dense:
        found = run(flash_attention, tensors, (), gradients)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_mistake_is_a_value_error_that_says_what_was_found():
    (q, k, v), _ = inputs(8)
    starts = documents((), (), n_time=8)
    for arguments, message in (
        ((q[0], k, v), r"q \(8, 4, 16\).*expected \(B, T, H, D\)"),
        ((q, k[:, :7], v[:, :7]), r"k \(2, 7, 2, 16\)"),
        ((q, k, v[..., :8]), r"v \(2, 8, 2, 8\)"),
        ((q, k.double(), v), r"k torch.float64"),
        ((q.long(), k.long(), v.long()), r"q is torch.int64"),
        ((q[:, :, :3], k, v), r"3 query heads cannot share 2 key/value heads"),
        ((q[:, :, :0], k, v), r"0 query heads cannot share 2 key/value heads"),
        (tuple(F.pad(x, (0, 8)) for x in (q, k, v)), r"head size 24: 16, 32, 64 and 128"),
        ((q, k, v, starts[:, :7]), r"starts \(2, 7\).*expected integers \(2, 8\)"),
        ((q, k, v, starts.float()), r"starts \(2, 8\) torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attention(*arguments)
