"""The kernels, one operation a file. Each file reads from the formula down to the function that is exported here.

They have one derivative, by backward(). For others, and for torch.func, there is kernels.reference: the same functions
in plain PyTorch.
"""

from .adamw import adamw
from .add_ranks import add_ranks
from .cross_entropy import cross_entropy
from .flash_attention import flash_attention
from .fp8_linear import fp8_linear
from .glu import geglu, swiglu
from .layer_norm import layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .rms_norm import add_rms_norm, rms_norm
from .rms_norm_linear import rms_norm_linear
from .rope import rope
from .swiglu_mlp import swiglu_mlp

__all__ = [
    "adamw",
    "add_ranks",
    "add_rms_norm",
    "cross_entropy",
    "flash_attention",
    "fp8_linear",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rms_norm_linear",
    "rope",
    "swiglu",
    "swiglu_mlp",
]
