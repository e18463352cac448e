"""Where a run's optimizer keeps its state: on the device, in CPU memory or on a drive."""

from model import Llama
from optimizers import OnCPU, OnDevice, OnDisk
from optimizers.place import Place
from optimizers.state_file import open_state_file
from runtime.memory import RunShape
from runtime.memory_advice import disk_bytes
from runtime.stream_weights import StreamedWeights


def pick_place(model: Llama, run: RunShape, device: str) -> Place:
    """The place that offload and offload_dir name. With offload=all on one rank, the weights move to the CPU, too.

    OSError or ValueError if memory cannot be pinned. It ends the run if the drive is too small.
    """
    if run.offload == "none":
        return OnDevice()
    streams = run.offload == "all" and run.world_size == 1  # with several ranks FSDP moves its own
    streamed = StreamedWeights(model, device) if streams else None
    if run.offload_dir:
        return OnDisk(open_state_file(run.offload_dir, disk_bytes(model.config, run)), streamed)
    return OnCPU(streamed)
