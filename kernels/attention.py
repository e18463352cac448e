"""Causal attention: kernels/flash_attention.py or PyTorch's, whichever is faster.

    y = softmax(q kᵀ / sqrt(D)) v        row t of q sees rows 0 .. t of k and v; with document starts, from there on

With document starts it is always ours: PyTorch's does not support them.

On Hopper our kernel is no slower than cuDNN's for heads of 64 and up to TRITON_TOKENS tokens, forward and backward, and
its gradients repeat bit for bit. At 8,192 tokens cuDNN takes as long, at 32,768 5% less (`python bench.py kernels`
times both). PyTorch before 2.11 would choose flash attention 2; on Hopper and later cuDNN is about 1.5 times as fast.
With the package flash-attn-4, PyTorch's flash attention becomes FlashAttention 4, the fastest of all on Hopper; its
gradients do not repeat bit for bit.
"""

import functools
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .flash_attention import HEAD_SIZES, flash_attention

BACKENDS = ("auto", "triton", "sdpa")
TRITON_TOKENS = 4096


def check_backend(backend: str, head_dim: int) -> None:
    """ValueError for a backend that does not exist, or that does not support this head size."""
    if backend not in BACKENDS:
        raise ValueError(f"attention {backend!r}: must be auto, sdpa or triton")
    if backend == "triton" and head_dim not in HEAD_SIZES:
        raise ValueError(f"attention 'triton' supports head sizes 16, 32, 64 and 128, not {head_dim}")


@torch.compiler.assume_constant_result  # torch.compile would trace into functools.cache, so that is one below
def activate_flash_attention_4() -> bool:
    """True on a Hopper with flash-attn-4 and PyTorch 2.14: PyTorch's flash attention is then FlashAttention 4."""
    return _activate_flash_attention_4()


@functools.cache
def _activate_flash_attention_4() -> bool:
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    installed = find_spec("flash_attn") and find_spec("flash_attn.cute")
    if not on_hopper or not installed or torch.__version__ < "2.14":
        return False
    torch.nn.attention.activate_flash_attention_impl("FA4")
    return True


def flash_attention_4_suits(head_dim: int, dtype: torch.dtype) -> bool:
    """True if PyTorch's flash attention is the best choice on Hopper."""
    return head_dim in (64, 128) and dtype in (torch.bfloat16, torch.float16) and activate_flash_attention_4()


def triton_suits(head_dim: int, n_time: int, dtype: torch.dtype) -> bool:
    """True if our kernel is the better choice on Hopper."""
    if flash_attention_4_suits(head_dim, dtype):
        return False
    return head_dim == 64 and n_time <= TRITON_TOKENS and dtype in (torch.bfloat16, torch.float16)


def picks_triton(q: torch.Tensor, backend: str) -> bool:
    """True if this backend computes queries q (B, T, H, D) by our kernel."""
    if backend != "auto":
        return backend == "triton"
    suits = q.is_cuda and triton_suits(q.shape[3], q.shape[1], q.dtype)
    return suits and torch.cuda.get_device_capability(q.device)[0] == 9


def pytorch_attention(q, k, v):
    """PyTorch's attention, for q, k and v as in attention()."""
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    gqa = q.shape[2] != k.shape[2]  # query heads share K and V in place: nothing is expanded
    if q.is_cuda:
        capability = torch.cuda.get_device_capability(q.device)[0]
        if not flash_attention_4_suits(q.shape[3], q.dtype):
            backends.insert(0 if capability >= 9 else 1, SDPBackend.CUDNN_ATTENTION)
        if gqa and (capability < 8 or q.dtype not in (torch.bfloat16, torch.float16)):
            # Flash and cuDNN do not support these, and the efficient kernel has no GQA: expand K and V, rather than
            # fall back to a kernel that holds (T, T) scores.
            n_groups = q.shape[2] // k.shape[2]
            k = k.repeat_interleave(n_groups, dim=2)
            v = v.repeat_interleave(n_groups, dim=2)
            gqa = False
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D) and (B, K, T, D)
    with sdpa_kernel(backends, set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return y.transpose(1, 2)  # (B, T, H, D): its heads lie side by side, as flash and cuDNN write them


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc_starts: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """Causal softmax(q kᵀ / sqrt(D)) v: (B, T, H, D).

    q (B, T, H, D), k and v (B, T, K, D) of any strides. doc_starts (B, T): the first position that each token sees;
    PyTorch's attention does not support it, so our kernel computes it, whatever the backend. backend: 'auto', 'triton'
    or 'sdpa', PyTorch's.
    """
    assert q.shape[1] == k.shape[1] == v.shape[1], (q.shape, k.shape, v.shape)
    if doc_starts is not None or picks_triton(q, backend):
        return flash_attention(q, k, v, doc_starts)
    return pytorch_attention(q, k, v)
