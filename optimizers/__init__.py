"""Update rules, one per file, and the optimizers that run them, one per place where their state lives."""

from collections.abc import Mapping

from torch import nn

from optimizers.adamw import AdamW
from optimizers.adamw8bit import AdamW8bit
from optimizers.galore import GaLore
from optimizers.muon import Muon
from optimizers.normuon import NorMuon
from optimizers.on_cpu import OnCPU
from optimizers.on_device import OnDevice
from optimizers.on_disk import OnDisk
from optimizers.optimizer import Optimizer
from optimizers.rule import Rule
from optimizers.soapmuon import SoapMuon
from optimizers.state_file import open_state_file
from runtime.distributed import on_all_ranks, world_size
from runtime.stream_weights import StreamedWeights


def rule_of(settings: Mapping) -> Rule:
    """The rule that the settings name. Add settings that change its states to STATE_SETTINGS in runtime/resume.py."""
    kind = {32: AdamW, 8: AdamW8bit}[settings["optimizer_bits"]]
    adamw = kind(weight_decay=settings["weight_decay"])
    match settings["optimizer"]:
        case "adamw":
            return adamw
        case "muon":
            return Muon(adamw)
        case "normuon":
            return NorMuon(adamw)
        case "soapmuon":
            return SoapMuon(adamw)
        case "galore":
            return GaLore(adamw, settings["galore_rank"])
    raise NotImplementedError(f"optimizer {settings['optimizer']}: give it a case in optimizers/__init__.py")


def new_optimizer(
    model: nn.Module, rule: Rule, offload: str, offload_dir: str | None, disk_bytes: float, device: str, **options
) -> Optimizer:
    """The optimizer in the place that offload and offload_dir name. options: Optimizer's.

    With offload=all on one rank, the weights move to the CPU, too. disk_bytes: what a rank keeps in offload_dir.
    OSError or ValueError if memory cannot be pinned. It ends the run if the drive is too small.
    """
    place = OnDevice
    if offload != "none":
        place = OnCPU
        streams = offload == "all" and world_size == 1  # with several ranks FSDP moves its own
        options["streamed"] = StreamedWeights(model, device) if streams else None
    if offload_dir:
        place = OnDisk
        options["file"] = open_state_file(offload_dir, disk_bytes)
    return on_all_ranks(lambda: place(model, rule, **options))
