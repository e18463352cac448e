"""APOLLO: each row of a gradient is scaled as AdamW would scale it, judged by a random projection to a few columns.

    R = G P      N = Adam's step for R      D = √(C / r) · (‖Nᵢ‖ / ‖Rᵢ‖) Gᵢ for each row i      w = w − lr · (λ w + D)

P (C, r) is drawn from a normal distribution of variance 1 / r, which preserves a row's norm on average. It is redrawn
every galore_interval updates, from a seed, so it is neither stored nor sent. √(C / r) makes up for Nᵢ having r elements
of about 1 where AdamW's step has C: so learning rate and weight decay are AdamW's. (The authors' runs leave it out, at
a learning rate of 0.01.) ‖D‖ of a weight (q, k and v together) may grow by at most 1% per update, which the paper found
to prevent spikes early in a run.

The paper scales the rows or the columns, whichever are more. Here it is always the rows, because FSDP splits them: R, N
and the moments stay on the rank of their rows, and only one number per weight travels, ‖D‖². State for a matrix of (O,
C): AdamW's of (O, r), in 8 bits only if r is a multiple of 256, and that number. Embedding, head and norms keep AdamW.

Zhu et al., APOLLO: SGD-like Memory, AdamW-level Performance, 2024. https://arxiv.org/abs/2412.05270
"""

import zlib
from dataclasses import dataclass

import torch

from kernels.sgdw import sgdw
from optimizers.adamw import AdamW
from optimizers.galore import adam_step, at_unit_rate
from optimizers.rule import MatrixRule, Shard

GROWTH = 1.01  # maximum growth of the norm of a weight's step
TINY = 1e-18  # the squares of a smaller norm underflow in float32: such a row takes a smaller step, or none


@dataclass(frozen=True)
class Apollo(MatrixRule):
    adamw: AdamW = AdamW()
    rank: int = 128
    interval: int = 200  # updates between two projections

    def matrix_states(self, name, parameter):
        projected = torch.empty(len(parameter), self.rank, device="meta")
        return self.adamw.states(name, projected) | {"norm": ((1,), torch.float32)}

    def update_matrices(self, shards, scalars, step, ranks):
        live, adam_scalars = scalars[0].isfinite(), at_unit_rate(scalars)
        scales = [self.scale_of_rows(shard, adam_scalars, step) for shard in shards]
        norms = torch.stack(
            [(x * s.grad.float().norm(dim=1)).square().sum() for x, s in zip(scales, shards, strict=True)]
        )
        for shard, scale, norm in zip(shards, scales, ranks.sum(norms).sqrt(), strict=True):
            before = shard.states["norm"]
            limited = torch.where(before > 0, norm.minimum(GROWTH * before), norm)
            before.copy_(torch.where(live, limited, before))
            if shard.grad.numel():
                direction = (scale * limited / norm.clamp(min=1e-30)).unsqueeze(1) * shard.grad
                sgdw(shard.parameter, direction, shard.master, scalars, 1.0, self.adamw.weight_decay)

    def scale_of_rows(self, shard: Shard, adam_scalars: torch.Tensor, step: int) -> torch.Tensor:
        """√(C / r) ‖Nᵢ‖ / ‖Rᵢ‖ of this rank's rows. Updates the moments."""
        n_columns, moments = shard.shape[1], {k: x for k, x in shard.states.items() if k != "norm"}
        generator = torch.Generator(shard.grad.device)
        generator.manual_seed(zlib.crc32(f"{shard.name} {step // self.interval}".encode()))
        options = {"generator": generator, "device": shard.grad.device, "dtype": torch.float32}
        projected = shard.grad.float() @ (torch.randn(n_columns, self.rank, **options) * self.rank**-0.5)
        n = adam_step(self.adamw, projected, moments, adam_scalars)
        return (n_columns / self.rank) ** 0.5 * n.norm(dim=1) / projected.norm(dim=1).clamp(min=TINY)
