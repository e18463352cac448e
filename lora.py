"""LoRA and QLoRA: train small adapters, keep all other weights as published.

    add_lora(model, rank=16, alpha=32)              # on the meta device, before compile and fully_shard
    add_lora(model, 16, 32, quantize_base="nf4")    # the frozen projections take 0.52 bytes per weight, not 2
    use_fp8(model, device); add_lora(model, 16, 32)     # 1 byte, multiplied in float8
    merge_lora(model)                               # a plain model with weights W + (α/r) B A

    for each matrix     y = x Wᵀ + (α/r) (x Aᵀ) Bᵀ        A (r, C) and B (O, r) are trained, B starts at zero

All seven matrices of a block have an adapter: q, k, v, o, gate, up, down. The embedding, the norms and the head are
frozen. A token costs 4 FLOPs per frozen weight instead of 6, and only the adapters have gradients, masters and moments:
8B at rank 16 trains 42 million parameters.

kernels/lora_linear.py, nf4_lora_linear.py and fp8_lora_linear.py are the projections; runtime/checkpoint.py reads the
frozen weights from init_from's folder; a checkpoint holds the adapters, under peft's names. float8 is only how a run
computes: its checkpoint's adapters apply to the published weights, unrounded.

Hu et al., LoRA, 2021. https://arxiv.org/abs/2106.09685    Dettmers et al., QLoRA, 2023. https://arxiv.org/abs/2305.14314
"""

import torch

from kernels import FP8Linear, FP8LoRALinear, FP8NF4LoRALinear, Linear, LoRALinear, NF4LoRALinear
from kernels.linear import replace_projections
from model import Llama

KINDS = {  # the projection with adapters, by quantize_base and original class
    ("none", Linear): LoRALinear, ("none", FP8Linear): FP8LoRALinear,
    ("nf4", Linear): NF4LoRALinear, ("nf4", FP8Linear): FP8NF4LoRALinear,
}  # fmt: skip


def add_lora(model: Llama, rank: int, alpha: float, quantize_base: str = "none") -> None:
    """Adds adapters of this rank to each projection in the model's layers, and freezes everything else.

    alpha: adapters are scaled by alpha / rank. quantize_base: of the frozen projections, 'nf4', or 'none' to keep their
    dtype; after use_fp8 they are multiplied in float8, and held in that or in NF4. The adapters have the model's
    dtype; init_weights initializes them. ValueError for shapes that NF4 cannot hold.
    """
    model.requires_grad_(False)

    def with_adapters(projection: Linear) -> LoRALinear:
        return KINDS[quantize_base, type(projection)](projection, rank, alpha)

    replace_projections(model.layers, with_adapters)


def merge_lora(model: Llama) -> None:
    """Turns a model with adapters, whole on one device, into a plain one: each weight is W + (α/r) B A, rounded once.

    W in NF4 or float8 is dequantized first: the adapters were trained on those values.
    """

    def merged(projection: Linear) -> Linear:
        if not isinstance(projection, LoRALinear):
            return projection
        with torch.device("meta"):
            plain = Linear(projection.in_features, *projection.rows)
        plain.weight = torch.nn.Parameter(projection.merged())
        return plain

    replace_projections(model.layers, merged)
    model.requires_grad_(True)
