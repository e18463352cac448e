"""Update rules, one per file, and the places where their state lives."""

from torch import nn

from optimizers.on_cpu import OnCPU
from optimizers.on_device import OnDevice
from optimizers.on_disk import OnDisk
from optimizers.optimizer import Optimizer
from optimizers.place import Place
from optimizers.rules import rule_of
from optimizers.state_file import open_state_file
from runtime.distributed import world_size
from runtime.stream_weights import StreamedWeights


def pick_place(model: nn.Module, offload: str, offload_dir: str | None, disk_bytes: float, device: str) -> Place:
    """The place that offload and offload_dir name. With offload=all on one rank, the weights move to the CPU, too.

    disk_bytes: what a rank keeps in offload_dir. OSError or ValueError if memory cannot be pinned. It ends the run if
    the drive is too small.
    """
    if offload == "none":
        return OnDevice()
    streams = offload == "all" and world_size == 1  # with several ranks FSDP moves its own
    streamed = StreamedWeights(model, device) if streams else None
    if offload_dir:
        return OnDisk(open_state_file(offload_dir, disk_bytes), streamed)
    return OnCPU(streamed)
