"""The same names in plain PyTorch, which the tests compare against. A model built with Execution(kernels="none") takes
everything from here but attention over sequences, for which kernels/attention.py chooses.
"""

from .adamw import adamw_reference as adamw
from .adamw8bit import adamw8bit_reference as adamw8bit
from .add_low_rank import add_low_rank_reference as add_low_rank
from .add_norm_linear import add_norm_linear_reference as add_norm_linear
from .add_norm_mlp import add_norm_mlp_reference as add_norm_mlp
from .add_ranks import add_ranks_reference as add_ranks
from .cross_entropy import cross_entropy_reference as cross_entropy
from .decode_attention import decode_attention_reference as decode_attention
from .flash_attention import flash_attention_reference as flash_attention
from .fp8_linear import fp8_linear_reference as fp8_linear
from .glu import glu_reference as glu
from .linear import linear_reference as linear
from .linear_cross_entropy import linear_cross_entropy_reference as linear_cross_entropy
from .nf4 import dequantize_nf4_reference as dequantize_nf4
from .rms_norm import add_rms_norm_reference as add_rms_norm
from .rms_norm import rms_norm_reference as rms_norm
from .rope import rope_reference as rope
from .sgdw import sgdw_reference as sgdw
