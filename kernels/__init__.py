"""The kernels, one operation a file. Each file reads from the formula down to the function that is exported here."""

from .cross_entropy import cross_entropy
from .glu import geglu, swiglu
from .layer_norm import layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .rms_norm import add_rms_norm, rms_norm
from .rope import rope

__all__ = [
    "add_rms_norm",
    "cross_entropy",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "swiglu",
]
