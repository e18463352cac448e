"""A projection: a linear layer, plus what the fused functions need from it.

    forward    y = x Wᵀ          backward    dx = dy W          dW = dyᵀ x

rms_norm_linear.py and swiglu_mlp.py compute forward and backward around their projections by hand. They pass
`tensors()` to autograd as their own inputs, and call the functions below with what autograd saved: backward never reads
a parameter, which FSDP may have freed by then. fp8_linear.py and lora_linear.py have the same functions, so a new
number format or adapter is one file and changes no fused function: `reference` is for the CPU and
--fused_kernels=false, `project` and the backward functions are for the GPU.

FLOPs: 2·N·C·O forward, 4·N·C·O backward. Saved: x (unless the fused function computes it again) and W.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .launch import accumulate, as_rows, refuse_autocast, refuse_double_backward, use_triton


class Linear(nn.Linear):
    """y = x Wᵀ without bias: nn.Linear and its parts. Shapes: x (..., C), y (..., O), weight (O, C)."""

    float8_input = False  # True if project also takes x, and input_gradient dy, rounded as in fp8_linear.py

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x):
        refuse_autocast(x)
        self.check("weight", x.shape[-1], x)
        return apply_projection(self, x, *self.tensors()) if use_triton(x) else self.reference(x)

    def reference(self, x):
        """y in plain PyTorch, for autograd."""
        return F.linear(x, self.weight)

    def check(self, name: str, n_in: int, x: torch.Tensor):
        """ValueError if inputs with n_in columns and the device and dtype of x cannot be projected."""
        check_weight(name, self.weight, n_in, x.dtype)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the functions below take, as autograd and FSDP see them: the weight comes first."""
        return (self.weight,)

    def flops(self) -> int:
        """FLOPs per row of x, forward and backward; a frozen weight has no gradient."""
        return (6 if self.weight.requires_grad else 4) * self.in_features * self.out_features

    @staticmethod
    def round_weight(*tensors):
        """w8 and t (O,), if input_gradient takes dy as (g8, u, w8) with t in g8; else (None, None)."""
        return None, None

    @staticmethod
    def project(x, weight, out=None):
        """y in x's dtype; into out (N, O), if given."""
        return F.linear(x, weight) if out is None else torch.mm(x, weight.T, out=out)

    @staticmethod
    def with_shared(dy, *tensors):
        """dy as the two functions below take it: together with what both would compute from it."""
        return dy

    @staticmethod
    def input_gradient(dy, weight, out=None):
        """dx in dy's dtype; into out (N, C), if given."""
        return dy @ weight if out is None else torch.mm(dy, weight, out=out)

    @staticmethod
    def weight_gradients(dy, x, weight, needed, sums=None, first=True):
        """The gradient of each of tensors(), None if not needed: (dW,).

        With sums (from new_sums), takes one slice of the rows and adds its gradients to sums, or overwrites them if the
        slice is the first; returns sums.
        """
        return (product(dy, x, sums and sums[0], first) if needed[0] else None,)


def check_weight(name, weight, n_in, dtype):
    if weight.ndim != 2 or weight.shape[1] != n_in or weight.dtype != dtype:
        raise ValueError(f"{name} {weight.dtype} {tuple(weight.shape)}: expected {dtype} (outputs, {n_in})")


def product(dy, x, total=None, first=True):
    """dyᵀ x; with total, added to it in total's dtype, or written to it if this is the first of several."""
    dy, x = as_rows(dy), as_rows(x)
    if total is None:
        return dy.T @ x
    accumulate(total, dy.T, x, first)
    return total


def new_sums(tensors, needed, dtype):
    """Uninitialised memory for the sums of weight_gradients over slices; None if not needed."""
    return [
        torch.empty(tensor.shape, dtype=dtype, device=tensor.device) if need else None
        for tensor, need in zip(tensors, needed, strict=True)
    ]


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        # With named inputs, torch.compile (up to 2.13) would omit ctx for two tensors without gradients.
        projection, x, *tensors = inputs
        ctx.projection = projection
        ctx.save_for_backward(x, *tensors)
        return projection.project(x, *tensors)

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward()
        x, *tensors = ctx.saved_tensors
        _, need_dx, *needed = ctx.needs_input_grad
        dy = ctx.projection.with_shared(dy, *tensors)
        dx = ctx.projection.input_gradient(dy, *tensors) if need_dx else None
        return None, dx, *ctx.projection.weight_gradients(dy, x, *tensors, needed=needed)


apply_projection = _Projection.apply  # (projection, x, *tensors): y, with backward by these functions


def linear(x: torch.Tensor, projection: Linear) -> torch.Tensor:
    """The projection (..., O) of x (..., C), which has the weight's dtype."""
    return projection(x)


def linear_reference(x, projection):
    return projection.reference(x)
