"""--profile=true traces three steps. Every run records its first ten steps' allocations, in case memory runs out."""

from pathlib import Path

import torch

from runtime import memory_stats
from runtime.distributed import print0, rank

STEPS = 10  # of a run: five to compile and allocate, two to warm up the profiler, three traced


class Profiler:
    """profiler = Profiler(out_dir, first_step, enabled=profile)
    profiler.step(step)         # after each step, counted from first_step + 1
    profiler.stop()             # at the end of the run
    """

    def __init__(self, out_dir: str, first_step: int, enabled: bool):
        self.folder, self.first_step, self.last_step = Path(out_dir) / "profile", first_step, first_step
        memory_stats.record_history()  # 2 us per allocation; most runs that do not fit fail in the first step
        self.trace = None
        if enabled:
            schedule = torch.profiler.schedule(wait=STEPS - 5, warmup=2, active=3, repeat=1)
            self.trace = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
            self.trace.start()

    def step(self, step: int) -> None:
        self.last_step = step
        if step > self.first_step + STEPS:
            return
        if self.trace:
            self.trace.step()
        if step == self.first_step + STEPS:
            memory_stats.stop_history()

    def at_edge(self, step: int) -> bool:
        """True if the trace starts or ends after this step: then the next step's kernels must not be queued yet."""
        return self.trace is not None and step - self.first_step in (STEPS - 3, STEPS)

    def stop(self) -> None:
        if self.trace and self.first_step < self.last_step < self.first_step + STEPS:
            self.trace.stop()
            print0(
                f"the profile is incomplete: it traces steps {STEPS - 2} to {STEPS} of a run, and this one was shorter"
            )

    def _write(self, trace):
        if self.folder.is_symlink():  # nothing is written through links
            self.folder.unlink(missing_ok=True)
        torch.profiler.tensorboard_trace_handler(str(self.folder), worker_name=f"rank{rank}")(trace)
        files = "*.json for https://ui.perfetto.dev or TensorBoard"
        if torch.cuda.is_initialized():
            memory_stats.dump(self.folder / f"rank{rank}.memory.pickle")
            files += ", *.pickle, what was in memory, for https://pytorch.org/memory_viz"
        print0(f"step {self.last_step:05d} | the trace is in {self.folder}: {files}")
