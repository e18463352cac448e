"""The rule that train.py's settings name. Settings that change its states go in runtime/resume.py's STATE_SETTINGS."""

from collections.abc import Mapping

from optimizers.adamw import AdamW
from optimizers.adamw8bit import AdamW8bit
from optimizers.galore import GaLore
from optimizers.muon import Muon
from optimizers.normuon import NorMuon
from optimizers.rule import Rule


def rule_of(settings: Mapping) -> Rule:
    kind = {32: AdamW, 8: AdamW8bit}[settings["optimizer_bits"]]
    adamw = kind(weight_decay=settings["weight_decay"])
    match settings["optimizer"]:
        case "adamw":
            return adamw
        case "muon":
            return Muon(adamw)
        case "normuon":
            return NorMuon(adamw)
        case "galore":
            return GaLore(adamw, settings["galore_rank"])
    raise NotImplementedError(f"optimizer {settings['optimizer']}: give it a case in optimizers/rules.py")
