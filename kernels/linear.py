"""A projection: a linear layer, plus what the fused functions need from it.

    forward    y = x Wᵀ          backward    dx = dy W          dW = dyᵀ x

add_norm_linear.py and add_norm_mlp.py compute forward and backward around their projections by hand. They pass
`tensors()` to autograd as their own inputs, and call the functions below with what autograd saved: backward never reads
a parameter, which FSDP may have freed by then. fp8_linear.py and lora_linear.py have the same functions, so a new
number format or adapter is one file and changes no fused function: `reference` is for the CPU and
--kernels=none, `project` and the backward functions are for the GPU.

FLOPs: 2·N·C·O forward, 4·N·C·O backward. Saved: x (unless the fused function computes it again) and W.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .launch import accumulate, as_rows, refuse_autocast, refuse_double_backward, use_triton


class Linear(nn.Linear):
    """y = x Wᵀ without bias: nn.Linear and its parts. Shapes: x (..., C), y (..., O), weight (O, C).

    rows: how many of the O rows belong to each matrix that the weight packs. To the model they are one; optimizers,
    adapters and checkpoints treat each by itself.
    """

    float8_input = False  # True if project also takes x, and input_gradient dy, rounded as in fp8_linear.py

    def __init__(self, n_in: int, *rows: int):
        super().__init__(n_in, sum(rows), bias=False)
        self.rows = rows

    def forward(self, x):
        refuse_autocast(x)
        self.check("weight", x.shape[-1], x)
        return apply_projection(self, x, *self.tensors()) if use_triton(x) else self.reference(x)

    def reference(self, x):
        """y in plain PyTorch, for autograd."""
        return F.linear(x, self.weight)

    def check(self, name: str, n_in: int, x: torch.Tensor):
        """Asserts that inputs with n_in columns and the device and dtype of x can be projected."""
        check_weight(name, self.weight, n_in, x.dtype)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the functions below take, as autograd and FSDP see them: the weight comes first."""
        return (self.weight,)

    def flops(self) -> int:
        """FLOPs per row of x, forward and backward; a frozen weight has no gradient."""
        return (6 if self.weight.requires_grad else 4) * self.in_features * self.out_features

    @staticmethod
    def round_weight(*tensors):
        """float8 only: the rounded weight w8 and its row scales t (O,); else (None, None). With t the kernel that
        writes dy also rounds it, dy diag(t) = diag(u) g8, and input_gradient takes (g8, u, w8) in place of `shared`.
        """
        return None, None

    @staticmethod
    def project(x, weight, out=None):
        """y in x's dtype; into out (N, O), if given."""
        return F.linear(x, weight) if out is None else torch.mm(x, weight.T, out=out)

    @staticmethod
    def share(dy, *tensors):
        """What input_gradient and weight_gradients both need of dy (LoRA: dy and dy B): their argument `shared`."""
        return dy

    @staticmethod
    def input_gradient(shared, weight, out=None):
        """dx in dy's dtype; into out (N, C), if given."""
        dy = shared
        return dy @ weight if out is None else torch.mm(dy, weight, out=out)

    @staticmethod
    def weight_gradients(shared, x, weight, needed, sums=(None,), first=True):
        """The gradient of each of tensors(), None if not needed: (dW,).

        With sums (from new_sums), takes one chunk of the rows and adds its gradients to sums, or overwrites them if the
        chunk is the first; returns sums.
        """
        dy = shared
        return (weight_gradient(dy, x, sums[0], first) if needed[0] else None,)


def check_weight(name, weight, n_in, dtype):
    fits = weight.ndim == 2 and weight.shape[1] == n_in and weight.dtype == dtype
    assert fits, f"{name} {weight.dtype} {tuple(weight.shape)}: expected {dtype} (outputs, {n_in})"


def weight_gradient(dy, x, total=None, first=True):
    """dW = dyᵀ x; with total, added to it in total's dtype, or written to it if this is the first of several."""
    dy = as_rows(dy)
    x = as_rows(x)
    if total is None:
        return dy.T @ x
    accumulate(total, dy.T, x, first)
    return total


def new_sums(tensors, needed, dtype):
    """Uninitialized memory for the sums of weight_gradients over chunks; None if not needed."""
    return [
        torch.empty(tensor.shape, dtype=dtype, device=tensor.device) if need else None
        for tensor, need in zip(tensors, needed, strict=True)
    ]


def matrix_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """By parameter name, how many of its rows belong to each matrix that it packs: outside projections, all to one."""
    rows = {name: tuple(parameter.shape[:1]) for name, parameter in model.named_parameters()}
    packed = {f"{name}.weight": module.rows for name, module in model.named_modules() if isinstance(module, Linear)}
    return rows | packed


def replace_projections(module: nn.Module, replacement: Callable[[Linear], Linear]) -> None:
    """Put replacement(projection) in the place of every projection in a module."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                setattr(parent, name, replacement(child))


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
        shared = ctx.projection.share(dy, *tensors)
        dx = ctx.projection.input_gradient(shared, *tensors) if need_dx else None
        return None, dx, *ctx.projection.weight_gradients(shared, x, *tensors, needed=needed)


apply_projection = _Projection.apply  # (projection, x, *tensors): y, with backward by these functions


def linear(x: torch.Tensor, projection: Linear) -> torch.Tensor:
    """The projection (..., O) of x (..., C), which has the weight's dtype."""
    return projection(x)


def linear_reference(x, projection):
    return projection.reference(x)
