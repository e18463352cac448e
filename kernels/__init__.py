"""The kernels, one operation per file. Each file reads from the formula down to the function exported here.

They support one derivative, by backward(). For higher ones and torch.func, use kernels.reference: the same functions in
plain PyTorch.
"""

from .adamw import adamw
from .adamw8bit import adamw8bit
from .add_low_rank import add_low_rank
from .add_norm_linear import add_norm_linear
from .add_norm_mlp import add_norm_mlp
from .add_ranks import add_ranks
from .cross_entropy import cross_entropy
from .decode_attention import decode_attention
from .flash_attention import flash_attention
from .fp8_linear import FP8Linear, fp8_linear, use_fp8
from .fp8_lora_linear import FP8LoRALinear, FP8NF4LoRALinear
from .glu import glu
from .linear import Linear, linear
from .linear_cross_entropy import linear_cross_entropy
from .lora_linear import LoRALinear
from .nf4 import NF4, dequantize_nf4, quantize_nf4
from .nf4_lora_linear import NF4LoRALinear
from .rms_norm import add_rms_norm, rms_norm
from .rope import rope
from .sgdw import sgdw
