"""The libraries beside which the kernels are measured. Each is optional: what is not installed has no arms.

    pip install liger-kernel==0.8.5 cut-cross-entropy==25.1.1

A peer is called by its public functions with their defaults, as its own patches of Hugging Face's models call it. Some
of Liger-Kernel's write gradients over their inputs, which saves memory and is theirs to choose. Timed again and again
they then read numbers that mean nothing, at the same speed; their errors are taken from fresh inputs.
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

EPS = 1e-5
Functions = dict[str, dict[str, Callable]]  # operation -> arm -> function


def liger() -> Functions:
    """Liger-Kernel: Hsu et al., 2024. https://github.com/linkedin/Liger-Kernel"""
    import liger_kernel.transformers.functional as liger

    def rope(qkv, cos, sin, n_head, wide_cos, wide_sin):
        n_kv_head = (qkv.shape[2] - n_head) // 2
        q, k, v = qkv.split([n_head, n_kv_head, n_kv_head], dim=2)
        q, k = liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), wide_cos, wide_sin)  # (B, heads, T, D)
        return q.transpose(1, 2), k.transpose(1, 2), v.contiguous()

    return {
        "rms_norm": {"liger": lambda x, weight: liger.liger_rms_norm(x, weight, EPS)},
        "add_rms_norm": {"liger": lambda x, residual, w: liger.liger_fused_add_rms_norm(x, residual, w, EPS)},
        "layer_norm": {"liger": lambda x, weight, bias: liger.liger_layer_norm(x, weight, bias, EPS)},
        "rope": {"liger": rope},
        "swiglu": {"liger": liger.liger_swiglu},
        "geglu": {"liger": liger.liger_geglu},
        "cross_entropy": {"liger": liger.liger_cross_entropy},
        "linear_cross_entropy": {
            "liger": liger.liger_fused_linear_cross_entropy,
            "liger_fp32": lambda x, weight, targets: liger.liger_fused_linear_cross_entropy(
                x, weight, targets, accum_dtype=torch.float32
            ),
        },
    }


def cut_cross_entropy() -> Functions:
    """Cut your losses: Wijmans et al., 2024. It leaves out the gradients of improbable tokens: see its error."""
    from cut_cross_entropy import linear_cross_entropy

    return {"linear_cross_entropy": {"cce": linear_cross_entropy}}


def torch_linear_cross_entropy() -> Functions:
    """PyTorch's own chunked head, since 2.13."""
    if not hasattr(F, "linear_cross_entropy"):
        return {}
    options = torch.nn.LinearCrossEntropyOptions()
    return {"linear_cross_entropy": {"torch": lambda *inputs: F.linear_cross_entropy(*inputs, options=options)}}


def installed() -> list[Functions]:
    """Of each library that is there. One that fails in any way is left out, with a word about it."""
    found = []
    for library in LIBRARIES:
        try:
            found.append(library())
        except ModuleNotFoundError:
            continue
        except Exception as error:  # a version without one of these functions, or Triton without a driver
            print(f"{library.__name__} is left out, {type(error).__name__}: {error}", file=sys.stderr)
    return found


LIBRARIES = (liger, cut_cross_entropy, torch_linear_cross_entropy)
PACKAGES = ("liger-kernel", "cut-cross-entropy")
