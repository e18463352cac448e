"""The loss scale for float16, which cannot represent numbers below 6e-8, where many gradients are.

So gradients are computed 2^16 times too large at first, and scaled back in the update. The scale halves when they
overflow, and doubles after 2,000 updates without overflow; train.py ends a run that overflows at a scale of 1. It lives
on the device, so that nothing waits for it: a step may be queued, or replayed by a CUDA graph, before the CPU knows
whether the last one overflowed.
"""

import torch

from runtime.distributed import world_size

GOOD_STEPS = 2000  # in a row, until the scale doubles


class LossScale:
    def __init__(self, device: str | torch.device):
        self.scale = torch.tensor(2.0**16, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros_like(self.scale)

    def inverse(self) -> torch.Tensor:
        """The factor that unscales the gradients: the loss is multiplied by scale / world_size.

        Until FSDP averages them, a rank's gradients are world_size times its share of the step's, and float16 must hold
        them.
        """
        return world_size / self.scale

    def update(self, finite: torch.Tensor) -> None:
        """finite: whether this step's gradients are finite, a bool scalar on the device."""
        good = torch.where(finite, self.good_steps + 1, 0.0)
        doubles = good >= GOOD_STEPS
        factor = torch.where(finite, 1.0 + doubles, 0.5)
        self.scale.mul_(factor)
        self.good_steps.copy_(good * ~doubles)

    def state(self, step: int) -> dict:
        """For run.json, after `step` steps: the scale, and the step that last changed it. Waits for the GPU."""
        return {"loss_scale": self.scale.item(), "loss_scale_since": step - int(self.good_steps.item())}

    def load(self, run: dict) -> None:
        self.scale.fill_(run["loss_scale"])
        self.good_steps.fill_(run["step"] - run["loss_scale_since"])
