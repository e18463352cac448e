"""The libraries that the kernels are compared with. Each is optional: one that is not installed is left out.

    pip install liger-kernel==0.8.5 cut-cross-entropy==25.1.1 bitsandbytes==0.50.2

A peer's public functions are called with their defaults, as its own patches of Hugging Face's models call them. Some
of Liger-Kernel's overwrite their inputs with gradients, a legitimate choice that saves memory. Repeated calls then read
meaningless numbers, at the same speed; their errors are measured on fresh inputs.
"""

import functools
import logging
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

EPS = 1e-5
Functions = dict[str, dict[str, Callable]]  # operation -> name -> function


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
    """Cut your losses: Wijmans et al., 2024. It skips the gradients of improbable tokens: see its error."""
    from cut_cross_entropy import linear_cross_entropy

    return {"linear_cross_entropy": {"cce": linear_cross_entropy}}


def bitsandbytes() -> Functions:
    """bitsandbytes: Dettmers et al., 2021 and 2023. Its 8-bit AdamW updates bfloat16 parameters without masters."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it mistakes our kernels/ for another package
    from bitsandbytes import functional as bnb

    @functools.cache
    def maps(device):
        signed, unsigned = (bnb.create_dynamic_map(signed=signed).to(device) for signed in (True, False))
        return signed, unsigned, bnb.get_4bit_type("nf4", device=device)

    def adamw8bit(parameter, grad, low, m, v, m_absmax, v_absmax, scalars):
        signed, unsigned, _ = maps(parameter.device)
        how = {"beta1": 0.9, "beta2": 0.95, "beta3": 0.0, "alpha": 0.0, "eps": 1e-8, "step": 1, "lr": 1e-3}
        absmax = {"absmax1": m_absmax, "absmax2": v_absmax, "weight_decay": 0.1}
        bnb.optimizer_update_8bit_blockwise(
            "adam", grad, parameter, m, v, qmap1=signed, qmap2=unsigned, **how, **absmax
        )
        return parameter

    def nf4(codes, scale_codes, scale_absmax, offset):
        signed, _, code = maps(codes.device)
        scales = bnb.QuantState(scale_absmax, code=signed, blocksize=256, dtype=torch.float32)
        shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
        state = bnb.QuantState(scale_codes, shape, code, 64, "nf4", torch.bfloat16, offset, scales)
        return bnb.dequantize_4bit(codes.view(-1, 1), state)

    return {"adamw8bit": {"bitsandbytes": adamw8bit}, "nf4": {"bitsandbytes": nf4}}


def torch_linear_cross_entropy() -> Functions:
    """PyTorch's own chunked head, since 2.13."""
    if not hasattr(F, "linear_cross_entropy"):
        return {}
    options = torch.nn.LinearCrossEntropyOptions()
    return {"linear_cross_entropy": {"torch": lambda *inputs: F.linear_cross_entropy(*inputs, options=options)}}


def installed() -> list[Functions]:
    """The functions of each installed library. One that fails to load is skipped, with a message."""
    libraries = []
    for library in LIBRARIES:
        try:
            libraries.append(library())
        except ModuleNotFoundError:
            continue
        except Exception as error:  # a version without one of these functions, or Triton without a driver
            print(f"{library.__name__} is left out, {type(error).__name__}: {error}", file=sys.stderr)
    return libraries


LIBRARIES = (liger, cut_cross_entropy, bitsandbytes, torch_linear_cross_entropy)
