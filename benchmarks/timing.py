"""How long a call takes on the GPU and on the CPU, its peak memory, and what the card can do at best.

A call is a function without arguments. Several calls do the same work on different inputs, enough of them
(`sets_to_miss_l2`) that no call finds its inputs in the L2 cache, as a training step would not either. Forward and
backward are timed on the same side stream (`use_side_stream`): autograd runs backward on the stream that forward ran
on, and a graph cannot be captured on the default stream.
"""

import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from data.encode import cpu_cores

GRAPH_MS = 10  # approximate time of one replay: long compared with an event's resolution, half a microsecond
ROW_MS = 150  # approximate time of all replays of a measurement
MAX_LAUNCHES = 200  # in a graph: capturing them costs as much host time as launching them
PROFILES = 5  # for calls that cannot be captured
REPLAYS = (9, 25)  # fewest and most: in long matmuls the card's clock drifts, by a few percent between two replays


def use_side_stream() -> None:
    torch.cuda.set_stream(torch.cuda.Stream())


def quantiles(values: list[float]) -> list[float]:
    """The 20%, 50% and 80% quantiles, interpolated between neighbors."""
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return [fifths[0], statistics.median(values), fifths[3]]


def sets_to_miss_l2(set_bytes: int) -> int:
    """How many sets of inputs make 3 times the L2 cache: by the time the first is used again, it is long evicted."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, math.ceil(3 * l2_bytes / set_bytes))


def mark() -> torch.cuda.Event:
    """The time when the GPU has done all that was launched until now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def events_ms(calls: list[Callable], rounds: int) -> list[float]:
    """The GPU's time from before to after each call, for `rounds` rounds of all calls."""
    events = []
    for call in calls * rounds:
        before = mark()
        call()
        events.append((before, mark()))
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def waits_for_gpu(call: Callable) -> bool:
    """True if the call waits for the GPU, which no graph can capture. A failed capture would have side effects."""
    with warnings.catch_warnings(action="ignore"):  # it warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" in str(error):
            return True
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def gpu_events(calls: list[Callable]) -> list:
    """What the GPU does in these calls. The profiler records nothing of the CPU, which would slow them."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            call()
        torch.cuda.synchronize()
    return [event for event in profiler.events() if event.device_type == DeviceType.CUDA]


def kernels_us(calls: list[Callable]) -> float:
    """The mean time of one call's kernels, copies and fills together, without the gaps between them."""
    return sum(event.time_range.elapsed_us() for event in gpu_events(calls)) / len(calls)


def capture(calls: list[Callable], launches: int) -> torch.cuda.CUDAGraph | None:
    """A graph of `launches` calls. Each result lives for len(calls) more calls, so that outputs go to cold memory too.

    None if the calls use a separate stream, as bitsandbytes' optimizers do: then the graph is empty.
    """
    graph = torch.cuda.CUDAGraph()
    results = deque(maxlen=len(calls))
    stream = torch.cuda.current_stream()
    with warnings.catch_warnings(record=True) as raised, torch.cuda.graph(graph, stream=stream):
        for launch in range(launches):
            results.append(calls[launch % len(calls)]())
    return None if any("Graph is empty" in str(warning.message) for warning in raised) else graph


def gpu_time(calls: list[Callable]) -> dict:
    """{'us': [20%, 50%, 80%] of the time of one call, 'graph': True if captured, False if profiled}. Warms up first.

    Many calls are captured in one CUDA graph, which is replayed: launches cost nothing, so the events time only the
    GPU. If nothing can be captured, the profiler adds up the times of a call's kernels.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    estimate = max(statistics.median(events_ms(calls, rounds=2)), 1e-3)
    launches = math.ceil(min(max(GRAPH_MS / estimate, 1), MAX_LAUNCHES) / len(calls)) * len(calls)
    graph = None if waits_for_gpu(calls[0]) else capture(calls, launches)
    if graph is None:
        return {"us": quantiles([kernels_us(calls) for _ in range(PROFILES)]), "graph": False}
    graph.replay()  # the first replay uploads the graph
    fewest, most = REPLAYS
    replays = round(min(max(ROW_MS / (estimate * launches), fewest), most))
    times = events_ms([graph.replay], replays)
    return {"us": [1000 * ms / launches for ms in quantiles(times)], "graph": True}


def host_us(call: Callable, repeats: int = 9) -> float:
    """Microseconds that the CPU takes to launch a call, without a graph, on an idle GPU: the median of several."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def wall_seconds(call: Callable, device: torch.device) -> float:
    """Seconds that a user waits for a call, on a GPU or a CPU."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def peak_mib(call: Callable) -> float:
    """Peak MiB of the call, including its results, above what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_tb_s() -> float:
    """The limit of memory-bound kernels: TB/s, read plus written, of copying 4 GiB, or a quarter of the free memory."""
    free_bytes, _ = torch.cuda.mem_get_info()
    source = torch.randn(min(2**30, free_bytes // 16), device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    # Not in a graph: there the driver uses the copy engines, 2.7 instead of 4.3 TB/s on an H200.
    times = events_ms([lambda: target.copy_(source)], rounds=REPLAYS[1])
    return 2 * source.nbytes / statistics.median(times) / 1e9


def matmul_tflops(n: int = 8192) -> float:
    """The limit of matmuls: TFLOP/s of an n x n x n bf16 product of random numbers (zeros would run faster)."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / gpu_time([lambda: torch.mm(a, b, out=out)])["us"][1] / 1e6


def cpu_copy_tb_s() -> float:
    """TB/s, read plus written, of copying 1 GiB in CPU memory: the best of five."""
    source, target = torch.randn(2, 2**28)
    seconds = min(wall_seconds(lambda: target.copy_(source), torch.device("cpu")) for _ in range(5))
    return 2 * source.nbytes / seconds / 1e12


def card() -> dict:
    """The device for a record, the card or else the CPU, and the limits that it reaches."""
    if not torch.cuda.is_available():
        return {"device": f"CPU, {torch.get_num_threads()} threads", "copy_tb_s": cpu_copy_tb_s()}
    use_side_stream()
    limits = {"copy_tb_s": copy_tb_s(), "matmul_tflops": matmul_tflops()}
    return {"device": torch.cuda.get_device_name(), **limits, "cpu_cores": cpu_cores()}
