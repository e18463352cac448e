"""A linear layer with float8 matmuls: forward, and the gradient of its input.

    forward     x = diag(s) x8      W = diag(t) W8      y = x Wᵀ = diag(s) (x8 W8ᵀ) diag(t)
    backward    g = dy diag(t) = diag(u) g8             dx = dy W = diag(u) (g8 W8)
                dW = dyᵀ x, in the dtype of x

float8 (e4m3) has 4 bits of exponent and 3 of mantissa, and ends at 448. So each row of x and of W is divided by its own
scale, 1/448 of its largest element, in fp32. A scale along the summed dimension cannot be taken out of the sum, and t
is one for dx: dy is multiplied by t before it is rounded, so one W8 serves both matmuls. dy is e4m3 too: the paper's
e5m2 for gradients trades a bit of mantissa for range, which a scale for each row provides. The weight's gradient is
summed over all tokens, where an outlier would cost the rest of its column their bits: it stays in bf16.

On an H200 these matmuls run at 1.6 times the rate of bf16. The cost is the rounding, bound by memory: it reads 2 bytes
per element and writes 1, for x, dy, and W twice. Backward writes W8 a second time, transposed, since float8 operands
must be contiguous along the summed dimension. `python bench.py kernels --op=fp8_linear,fp8_weight` times both.

W8 is not kept. Rounding a layer of Llama 3.2 1B for forward and backward takes 127 us (fp8_weight). So keeping W8 and
its transposed copy over the micro-batches of a step, at two bytes per weight, would save at most 0.6% with
micro-batches of 32,768 tokens, 1.1% with 16,384. But then everything that changes, frees or replays the weights
(updates, FSDP, offload, CUDA graphs) would have to know of it.

A norm or a gated product whose result is only projected (add_norm_linear.py, add_norm_mlp.py) rounds it itself: it
writes x8 and s in place of x, 1 byte per element instead of 2, and no other kernel reads x to round it. In backward the
gated product also writes g8 and u of its gradient, beside the dy that dW needs: no other kernel reads dy to round it.
The other dy come from kernels that do not know t: a separate kernel rounds them, in 0.7% of such a step.

FP8Linear is the projection (linear.py) that add_norm_linear.py and add_norm_mlp.py multiply with; use_fp8 puts it in
the place of a model's.

FLOPs: 2·N·C·O forward, 4·N·C·O backward, half of it in float8. Saved: x and W, as for any linear layer.
On one H200, where its matmuls alone, or for a weight's rounding a copy, are 100%: fp8_linear forward and backward
93-96%; fp8_weight forward 78-93%.

Micikevicius et al., FP8 Formats for Deep Learning, 2022. https://arxiv.org/abs/2209.05433
"""

import torch
import torch.nn.functional as F

from .launch import as_rows, contiguous_rows, magnitude, refuse_autocast, tl, triton, use_triton, whole_row
from .linear import Linear, apply_projection, check_weight, replace_projections

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
TILE = 64  # a program transposes 64 x 64 bytes of a weight


def quantize_reference(x, factors=None):
    """x (N, C), times factors (C,) if given, as float8 (N, C) and fp32 scales (N, 1): x = scales · float8."""
    x = x.float() if factors is None else x.float() * factors
    scales = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x / scales).to(FLOAT8), scales


def rounded_reference(x):
    """x rounded to float8, in fp32. The gradient passes through unchanged."""
    x8, scales = quantize_reference(as_rows(x.detach()))
    return x.float() + ((scales * x8.float()).view(x.shape) - x.float()).detach()


def fp8_linear_reference(x, weight):
    """Its gradients are those of x Wᵀ at the rounded x and W, and the gradient of y is not rounded. So dW is off by the
    rounding of x; the kernel's is not, as it uses x itself.
    """
    return F.linear(rounded_reference(x), rounded_reference(weight)).to(x.dtype)


@triton.jit
def float8_scale(largest, LARGEST: tl.constexpr = 448.0):  # a kernel cannot read Python's globals
    """The scale of a row, from its largest magnitude. With a NaN or an infinity the row becomes NaN, as in bf16."""
    largest = largest.to(tl.float32, bitcast=True)
    return tl.maximum(largest, 1e-12) / LARGEST + 0.0 * largest


@triton.jit
def store_float8(x, out_ptr, scale_ptr, cols, mask):
    """Rounds a row x (fp32, 0 where masked) to float8 and stores it at out_ptr, and its scale."""
    scale = float8_scale(tl.max(magnitude(x), axis=0))
    # 8 elements per thread, as they are loaded in bf16. For 16, the widest store, the compiler would distribute the
    # whole row differently, the norm would add its squares in another order, and y would have other bits.
    out_ptrs = tl.max_contiguous(out_ptr + cols, 8)
    tl.store(out_ptrs, (x / scale).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr, scale)


@triton.jit
def _quantize_kernel(x_ptr, factors_ptr, out_ptr, scales_ptr, n_cols, FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    """One program, one row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    if FACTORS:
        x *= tl.load(factors_ptr + cols, mask=mask, other=0.0)
    store_float8(x, out_ptr + row * n_cols, scales_ptr + row, cols, mask)


def empty_rows(shape, like: torch.Tensor, float8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Uninitialized (..., C): float8 and fp32 scales (N, 1) of its N rows, or the dtype of `like` and no scales."""
    out = torch.empty(shape, dtype=FLOAT8 if float8 else like.dtype, device=like.device)
    scales = torch.empty(as_rows(out).shape[0], 1, dtype=torch.float32, device=like.device) if float8 else None
    return out, scales


def quantize(x: torch.Tensor, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., C), times factors (C,) fp32 if given, as float8 (..., C) and fp32 scales (N, 1)."""
    rows = contiguous_rows(x)
    n_rows, n_cols = rows.shape
    out, scales = empty_rows(x.shape, x, float8=True)
    if n_rows:
        _quantize_kernel[(n_rows,)](
            rows, rows if factors is None else factors, out, scales, n_cols,
            FACTORS=factors is not None, **whole_row(n_cols),
        )  # fmt: skip
    return out, scales


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, n_rows, n_cols, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * n_cols + cols[None, :], mask=inside, other=0)
    tl.store(out_ptr + cols.to(tl.int64)[:, None] * n_rows + rows[None, :], tl.trans(x), mask=tl.trans(inside))


def transpose(x8: torch.Tensor) -> torch.Tensor:
    """x8 (O, C) contiguous as (C, O) contiguous."""
    n_rows, n_cols = x8.shape
    out = torch.empty(n_cols, n_rows, dtype=x8.dtype, device=x8.device)
    grid = triton.cdiv(n_rows, TILE), triton.cdiv(n_cols, TILE)
    _transpose_kernel[grid](x8.view(torch.uint8), out.view(torch.uint8), n_rows, n_cols, TILE=TILE)
    return out


# use_fast_accum=True would take 12% less time, 3% of a step. But then the tensor cores' own sums, of 14 bits and
# truncated, are added to fp32 ones too rarely: if all products are positive, y comes out 1.7% too small at K = 1,024
# and 24% at 16,384, instead of the 0.2% of the operands' rounding (H200).
def scaled_mm(a8, b8, scale_a, scale_b, dtype, out):
    """diag(scale_a) (a8 b8ᵀ) diag(scale_b) of a8 (M, K) and b8 (N, K), both contiguous."""
    if a8.shape[0] == 0:
        return scale_a.new_empty(0, b8.shape[0], dtype=dtype)
    return torch._scaled_mm(a8, b8.T, scale_a, scale_b, out_dtype=dtype, use_fast_accum=False, out=out)


def project_float8(x, w8, t, dtype, out=None):
    """y of x, or of quantize(x), and of the weight diag(t) w8."""
    x8, s = x if isinstance(x, tuple) else quantize(x)
    return scaled_mm(as_rows(x8), w8, s, t.T, dtype, out).view(*x8.shape[:-1], len(w8))


def input_gradient_float8(g8, u, wt8, dtype, out=None):
    """dx of diag(u) g8 = dy diag(t) and of wt8 (C, O), w8 transposed, where the weight is diag(t) w8."""
    one = torch.ones(1, len(wt8), dtype=torch.float32, device=g8.device)
    return scaled_mm(as_rows(g8), wt8, u, one, dtype, out).view(*g8.shape[:-1], len(wt8))


class FP8Linear(Linear):
    """A projection with float8 matmuls, except for the gradient of its weight: fp8_linear as a module."""

    float8_input = True

    def __init__(self, base: Linear):
        """With the weight of base."""
        with torch.device("meta"):
            super().__init__(base.in_features, *base.rows)
        self.weight = base.weight

    def reference(self, x):
        return fp8_linear_reference(x, self.weight)

    def check(self, name, n_in, x):
        super().check(name, n_in, x)
        check_fp8(x, self.weight.shape)

    @staticmethod
    def project(x, weight, out=None):
        return project_float8(x, *quantize(weight), weight.dtype, out)

    @staticmethod
    def round_weight(weight):
        w8, t = quantize(weight)
        return w8, t.view(-1)

    @staticmethod
    def input_gradient(shared, weight, out=None):
        if isinstance(shared, tuple):  # already rounded by its producer, with the factors of the same w8
            g8, u, w8 = shared
            return input_gradient_float8(g8, u, transpose(w8), weight.dtype, out)
        dy = shared
        w8, t = FP8Linear.round_weight(weight)
        return input_gradient_float8(*quantize(dy, t), transpose(w8), dy.dtype, out)


def use_fp8(model: torch.nn.Module, device: str = "cpu") -> None:
    """Turns every projection of the model's layers into an FP8Linear with the same weight.

    device: where the model, which may be on meta, will run. ValueError for a GPU without float8 matmuls, for
    a dtype other than bfloat16 on a GPU, for widths that are not multiples of 16, and after add_lora.
    """
    projections = [module for module in model.layers.modules() if type(module) is Linear]
    if not projections:
        raise ValueError("use_fp8 found no plain projection: call it once, and before add_lora")
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and (projections[0].weight.dtype != torch.bfloat16 or torch.cuda.get_device_capability() < (8, 9)):
        gpu = "a GPU of compute capability 8.9 or more, RTX 40, L4, H100 or newer"
        raise ValueError(f"fp8 needs dtype bfloat16 and {gpu}: --fp8=false")

    def in_float8(projection: Linear) -> FP8Linear:
        if projection.in_features % 16 or projection.out_features % 16:
            shape = f"{projection.out_features} x {projection.in_features}"
            raise ValueError(f"fp8 needs projections whose sides are multiples of 16, not {shape}: --fp8=false")
        return FP8Linear(projection)

    replace_projections(model.layers, in_float8)


def check_fp8(x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Asserts that float8 matmuls run for x and a weight of this shape. The reference runs everywhere."""
    if not use_triton(x):
        return
    assert not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 9), "float8 needs RTX 40, H100 or newer"
    assert x.dtype == torch.bfloat16, f"x is {x.dtype}: float8 matmuls read and write bfloat16"
    assert shape[0] % 16 == 0 and shape[1] % 16 == 0, f"weight {tuple(shape)}: float8 matmuls need multiples of 16"


def fp8_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T, with float8 operands in forward and in the gradient of x (Micikevicius et al., 2022).

    x (..., C) and weight (O, C), both bfloat16, C and O multiples of 16. Returns (..., O) bfloat16: for random numbers
    ‖y − x Wᵀ‖ is 3.7% of ‖x Wᵀ‖. The gradient of x is as far off, that of W is as in bfloat16. A row with a NaN or an
    infinity becomes NaN. Needs compute capability 8.9 (Ada). ValueError under autocast. Without Triton the reference
    runs, in any dtype; its gradient of W is of the rounded x.
    """
    refuse_autocast(x)
    check_weight("weight", weight, x.shape[-1], x.dtype)
    check_fp8(x, weight.shape)
    return apply_projection(FP8Linear, x, weight) if use_triton(x) else fp8_linear_reference(x, weight)
