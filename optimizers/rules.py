"""Which update rule train.py's settings name."""

from collections.abc import Mapping

from optimizers.adamw import AdamW
from optimizers.adamw8bit import AdamW8bit


def rule_of(settings: Mapping) -> AdamW:
    kind = {32: AdamW, 8: AdamW8bit}[settings["optimizer_bits"]]
    return kind(betas=(settings["beta1"], settings["beta2"]), weight_decay=settings["weight_decay"])
