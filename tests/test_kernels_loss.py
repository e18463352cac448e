"""What cross_entropy and linear_cross_entropy promise beyond what test_kernels.py tests for every operation."""

import sys
from functools import partial

import pytest
import torch

import kernels
from kernels import linear_cross_entropy, reference
from kernels.cross_entropy import losses_of_rows
from test_kernels import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    FP64,
    HAS_GPU,
    OPERATIONS,
    Operation,
    assert_close,
    assert_matches_float64,
    assert_same,
    cross_entropy_oracle,
    full_size,
    linear_cross_entropy_oracle,
    loss_targets,
    randn,
    relative_error,
    rounding,
    run,
    widened,
)

# Through one signature, f(logits, targets): with an identity head, the logits are x.
LOSSES = {
    "cross_entropy": kernels.cross_entropy,
    "linear_cross_entropy": lambda logits, targets: linear_cross_entropy(
        logits, torch.eye(logits.shape[1], dtype=logits.dtype, device=DEVICE), targets, chunk_tokens=3
    ),
    "cross_entropy_reference": reference.cross_entropy,
}
LINEAR = LOSSES["linear_cross_entropy"]
ONE = [torch.ones((), device=DEVICE)]
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def operation(loss):
    return Operation(loss, cross_entropy_oracle, bias_of_dx=1 if loss is LINEAR else 0.25)


def linear_operation(**options):
    return Operation(partial(linear_cross_entropy, **options), linear_cross_entropy_oracle, bias_of_dx=1)


def loss_inputs():
    (logits,), (targets,) = OPERATIONS["cross_entropy"].inputs(11, 70, FP32)
    return logits, targets


def linear_inputs(rows, n_vocab, dtype=FP32):
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(rows, n_vocab, dtype)
    return x, weight, targets


# ---------------------------------------------------------------------------------------------------------------------
# Labels and logits out of the ordinary


def test_cross_entropy_takes_any_leading_dimensions():
    logits, targets = loss_inputs()
    loss, gradient = run(kernels.cross_entropy, (logits[:6],), (targets[:6],), ONE)
    shaped = run(kernels.cross_entropy, (logits[:6].view(2, 3, 70),), (targets[:6].view(2, 3),), ONE)
    assert_same(shaped, (loss, gradient.view(2, 3, 70)), "(2, 3)")


@each_loss
def test_ignored_rows_alone_give_loss_0_and_zero_gradients(loss):
    targets = torch.full((11,), -100, device=DEVICE)
    value, gradient = run(loss, (randn(11, 70),), (targets,))
    assert value == 0 and (gradient == 0).all(), f"loss {value}, gradient {gradient}"


@each_loss
def test_an_ignored_row_leaves_no_trace(loss):
    logits, targets = loss_inputs()
    clean, _ = run(loss, (logits,), (targets,), ONE)
    logits[targets == -100] = 1e4 if loss is LINEAR else float("nan")
    value, gradient = run(loss, (logits,), (targets,), ONE)
    assert torch.equal(value, clean), f"loss {value}, without the ignored rows {clean}"
    assert (gradient[targets == -100] == 0).all()


@pytest.mark.parametrize("target", [-1, 70, 2**40, None])  # None: its row is NaN
@each_loss
def test_a_target_out_of_range_makes_the_loss_nan_and_touches_no_other_row(loss, target):
    logits, targets = loss_inputs()
    _, clean = run(loss, (logits,), (targets,), ONE)
    if target is None:
        logits[5] = float("nan")
    else:
        targets[5] = target
    value, gradient = run(loss, (logits,), (targets,), ONE)
    others = torch.arange(len(targets), device=DEVICE) != 5
    assert value.isnan() and gradient[5].isnan().any(), f"loss {value}"
    assert torch.equal(gradient[others], clean[others]), "a neighbor's gradient changed"


@pytest.mark.parametrize("size", [1e4, 5e9])
@each_loss
def test_large_finite_logits_give_the_loss_and_gradient_of_float64(loss, size):
    logits, targets = loss_inputs()
    logits *= size
    logits[0, :2] = size
    targets[0] = 0  # two maxima
    logits[3] = size + torch.arange(70, device=DEVICE) % 4  # log₂e times these would be rounded too much
    assert_matches_float64(operation(loss), (logits,), (targets,))


# ---------------------------------------------------------------------------------------------------------------------
# When gradients are computed, and how they are scaled and summed


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_fp16_gradients_do_not_underflow_before_the_loss_scale(name):
    """fp16 can hold neither p/n nor the scale, but their product. The targets' own entries would hide it."""
    rows, n_vocab, scale = (16384, 2000, 2.0**18) if HAS_GPU else (32, 4000, 2.0**17)
    logits = 0.1 * randn(rows, n_vocab, dtype=FP16)
    targets = torch.randint(n_vocab, (rows,), device=DEVICE)
    upstream = [torch.tensor(scale, device=DEVICE)]
    if name == "cross_entropy":
        _, gradient = run(kernels.cross_entropy, (logits,), (targets,), upstream)
    else:  # x is the identity: the logits are the head, and so are their gradients
        x = torch.eye(rows, dtype=FP16, device=DEVICE)
        gradient = run(linear_cross_entropy, (x, logits.T), (targets,), upstream)[2].T
    truth = run(cross_entropy_oracle, (logits.double(),), (targets,), widened(upstream))[1]
    rest = torch.ones_like(truth).scatter_(1, targets[:, None], 0)
    error = relative_error(gradient * rest, truth * rest)
    assert error < 1e-3, f"relative error {error:.2e} beside the targets, largest {(truth * rest).abs().max():.2e}"


def test_the_weight_gradient_is_summed_in_fp32_over_the_chunks():
    """512 + 32.53125 is 544.5 in fp16: one token per chunk would round at every addition."""
    rows = 32
    x = torch.full((rows, 1), 65.0625, dtype=FP16, device=DEVICE)
    weight = torch.zeros(2, 1, dtype=FP16, device=DEVICE)
    targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    function = partial(linear_cross_entropy, chunk_tokens=1)
    _, _, dweight = run(function, (x, weight), (targets,), [torch.tensor(float(rows), device=DEVICE)])
    assert dweight.flatten().tolist() == [-32.53125 * rows, 32.53125 * rows]


def test_fp16_weight_gradients_hold_what_x_over_n_would_not():
    """1.3 · 2⁻²³ is 2.6 times fp16's smallest number: rounded for each token, the sum would be 15% too large."""
    x = torch.full((32, 1), 1.3, dtype=FP16, device=DEVICE)
    weight = torch.zeros(2, 1, dtype=FP16, device=DEVICE)
    targets = torch.zeros(32, dtype=torch.int64, device=DEVICE)
    _, _, dweight = run(linear_cross_entropy, (x, weight), (targets,), [torch.tensor(2.0**-18, device=DEVICE)])
    exact = 0.5 * 1.3 * 2**-18
    assert dweight.flatten().tolist() == pytest.approx([-exact, exact], abs=2**-24)


def test_a_weight_gradient_summed_in_bf16_is_close_and_given_once():
    x, weight, targets = linear_inputs(12, 70, BF16)
    narrow = partial(linear_cross_entropy, chunk_tokens=5, fp32_dweight=False)
    exact = run(linear_cross_entropy_oracle, widened((x, weight)), (targets,), widened(ONE))
    for ours, truth in zip(run(narrow, (x, weight), (targets,), ONE), exact, strict=True):
        assert relative_error(ours, truth) < 4 * rounding(BF16)
    loss = narrow(x.requires_grad_(), weight.requires_grad_(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_one_chunk_and_without_autograd_the_loss_is_the_same():
    for dtype in (BF16, FP32, FP64):
        x, weight, targets = linear_inputs(11, 70, dtype)
        x = x.T.contiguous().T
        loss, *_ = assert_matches_float64(linear_operation(), (x, weight), (targets,))
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets), loss)


@pytest.mark.skipif(HAS_GPU, reason="a GPU runs Triton")
def test_without_triton_chunks_match_float64_and_never_hold_all_logits(monkeypatch):
    monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    monkeypatch.setattr(sys.modules["kernels.linear_cross_entropy"], "PLAIN_LOGITS", 300)  # 4 tokens
    for dtype in (FP16, BF16, FP32, FP64):
        *inputs, targets = linear_inputs(11, 69, dtype)
        assert_matches_float64(linear_operation(), inputs, (targets,))
    assert_never_holds_all_logits(linear_cross_entropy)
    x, weight, targets = linear_inputs(11, 70)
    expected = linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, targets), expected)
    targets[5] = 70
    assert linear_cross_entropy(x, weight, targets).isnan(), "a target out of range"


@pytest.mark.parametrize("options", [{}, {"fp32_dweight": False}], ids=str)
def test_overwrite_x_makes_x_its_own_gradient(options):
    x, weight, targets = linear_inputs(7, 70, BF16)
    chunked = partial(linear_cross_entropy, chunk_tokens=3, **options)
    _, dx, dweight = run(chunked, (x, weight), (targets,), ONE)
    leaf = x.clone().requires_grad_()
    weight = weight.requires_grad_()
    hidden = leaf.clone()
    met = []
    hidden.register_hook(lambda gradient: met.append(gradient.data_ptr()))
    chunked(hidden, weight, targets, overwrite_x=True).backward()
    assert torch.equal(leaf.grad, dx) and torch.equal(weight.grad, dweight)
    assert met == [hidden.data_ptr()], "it took memory of its own"
    strided = leaf.detach().T.contiguous().T  # not overwritten
    before = strided.clone()
    _, dx, dweight = run(chunked, (strided, weight), (targets,), ONE)
    assert_same(run(partial(chunked, overwrite_x=True), (strided, weight), (targets,), ONE)[1:], (dx, dweight), "")
    assert torch.equal(strided, before)
    frozen = x.detach().clone()
    chunked(frozen, weight, targets, overwrite_x=True).backward()
    assert torch.equal(frozen, x), "an x without a gradient was overwritten"
    read_again = leaf.clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (read_again.square().sum() + chunked(read_again, weight, targets, overwrite_x=True)).backward()


# ---------------------------------------------------------------------------------------------------------------------
# Work and memory


def profile(function):
    """How many matrix products function ran, and its largest single allocation, in bytes."""
    if HAS_GPU:
        function()  # the first run allocates cuBLAS's workspace
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * HAS_GPU
    with torch.profiler.profile(activities=activities, profile_memory=True) as record:
        function()
    memory = "self_device_memory_usage" if HAS_GPU else "self_cpu_memory_usage"
    products = sum(event.name in ("aten::mm", "aten::addmm") for event in record.events())
    return products, max(getattr(event, memory) for event in record.events())


@pytest.mark.parametrize("context, need_dx, need_dweight", [
    *((torch.enable_grad, *needed) for needed in ((True, True), (True, False), (False, True), (False, False))),
    (torch.no_grad, True, True), (torch.inference_mode, True, True),
])  # fmt: skip
def test_linear_cross_entropy_skips_unneeded_gradients(context, need_dx, need_dweight):
    """Two chunks: each has a product for the logits, for dX and for dW. No fp32 (V, C) for a frozen weight."""
    x, weight, targets = linear_inputs(6, 500)
    x.requires_grad_(need_dx), weight.requires_grad_(need_dweight)

    def step():
        with context():
            loss = linear_cross_entropy(x, weight, targets, chunk_tokens=3)
        if loss.requires_grad:
            loss.backward()

    products, largest = profile(step)
    gradients = (need_dx, need_dweight) if context is torch.enable_grad else (False, False)
    assert products == 2 * (1 + sum(gradients)), f"{products} matrix products"
    assert gradients[1] or largest < 4 * weight.numel(), f"{largest} bytes at once without a gradient of the weight"


def test_linear_cross_entropy_never_holds_all_logits():
    assert_never_holds_all_logits(partial(linear_cross_entropy, chunk_tokens=8))


def assert_never_holds_all_logits(function):
    x, weight, targets = linear_inputs(32, 500)
    x.requires_grad_(), weight.requires_grad_()
    _, largest = profile(lambda: function(x, weight, targets).backward())
    assert largest < 4 * len(x) * len(weight), f"{largest} bytes at once"


# ---------------------------------------------------------------------------------------------------------------------
# Full size


@full_size
def test_linear_cross_entropy_peak_memory_at_full_size():
    x = randn(16384, 2048, dtype=BF16)
    weight = randn(128256, 2048, dtype=BF16)
    targets = torch.randint(128256, (16384,), device=DEVICE)
    x.requires_grad_(), weight.requires_grad_()
    linear_cross_entropy(x[:300], weight, targets[:300]).backward()  # allocates cuBLAS's workspace
    for options, mib in (({}, 2.1 * 1024), (dict(chunk_tokens=512, fp32_dweight=False), 700)):
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(x, weight, targets, **options).backward()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        assert peak < mib, f"{peak:.0f} MiB above the inputs with {options}"


@full_size
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_linear_cross_entropy_at_full_size_matches_float64(dtype):
    """Two chunks: PyTorch's own function takes 35 GB for them; more would not fit on the workers' GPU."""
    x = randn(8192, 2048, dtype=dtype)
    weight = randn(128256, 2048, dtype=dtype) / 45
    targets = loss_targets(8192, 128256)
    scale = torch.tensor(1024.0, device=DEVICE)
    truth = truth_in_chunks(x, weight, targets, scale)
    assert_matches_float64(linear_operation(), (x, weight), (targets,), [scale], truth)


def truth_in_chunks(x, weight, targets, scale):
    """The oracle in float64, 1,024 tokens at a time: all the logits would take 17 GB per copy."""
    weight = weight.double().requires_grad_()
    loss = 0
    dx = []
    n_valid = (targets != -100).sum()
    for x_chunk, target_chunk in zip(x.split(1024), targets.split(1024), strict=True):
        x_chunk = x_chunk.double().requires_grad_()
        share = (target_chunk != -100).sum() / n_valid
        chunk = linear_cross_entropy_oracle(x_chunk, weight, target_chunk) * share
        (chunk * scale).backward()
        loss += chunk.detach()
        dx.append(x_chunk.grad)
    return [loss, torch.cat(dx), weight.grad]


@full_size
@pytest.mark.parametrize("rows", [16384, 16896])  # the second is past 2³¹ logits
def test_cross_entropy_at_full_size_matches_float64(rows):
    logits = 3 * randn(rows, 128256, dtype=BF16)
    targets = loss_targets(rows, 128256)
    losses = losses_of_rows(logits, targets)[0]
    _, dlogits = run(kernels.cross_entropy, (logits,), (targets,), ONE)
    for part in (slice(0, 512), slice(rows // 2, rows // 2 + 512), slice(rows - 512, rows)):
        n_part = (targets[part] != -100).sum()
        arguments = [logits[part]], [targets[part]], [n_part / (targets != -100).sum()]
        eager = run(cross_entropy_oracle, *arguments)
        truth = run(cross_entropy_oracle, *map(widened, arguments))
        assert_close("loss", losses[part].sum() / n_part, truth[0], eager[0])
        assert_close("dlogits", dlogits[part], truth[1], eager[1])
