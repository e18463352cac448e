"""Muon for the blocks' matrices: the step is the orthogonalized momentum.

    m = β m + (1 − β) g      u = (1 − β) g + β m                                                     Nesterov
    O = U Vᵀ of u = U S Vᵀ, about: five times X = a X + (b X Xᵀ + c (X Xᵀ)²) X from X = u / ‖u‖      Polar Express
    w = w − lr · (λ w + 0.2 √max(rows, columns) · O)                       so its RMS is about that of an AdamW step

q, k, v, gate and up count as separate matrices. State: m in float32, 4 bytes per parameter. X is bfloat16 on a GPU.
Embedding, head and norms keep AdamW, at twice the matrices' learning rate.

Under FSDP each rank holds some rows of each matrix. In each round every rank owns some matrices: one all-to-all brings
it their rows, it orthogonalizes them whole, another sends the rows of O back. While it computes one round, the rows of
the next are in flight. So the ranks share the work, and compute what one rank would.

Jordan et al., Muon, 2024. https://kellerjordan.github.io/posts/muon
Amsel et al., The Polar Express, 2025. https://arxiv.org/abs/2505.16932
Liu et al., Muon is Scalable for LLM Training, 2025 (the factor). https://arxiv.org/abs/2502.16982
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from kernels.sgdw import sgdw
from optimizers.adamw import AdamW
from optimizers.rule import MatrixRule, Ranks, Shard

# a, b, c of each iteration, from the paper's algorithm for five: they map singular values of X from 0.001 to 1 to 0.85
# to 1.14, with a safety factor and a cushion of 0.02. The first is for X / 1.02, which is safely below 1.
POLAR_EXPRESS = (
    (8.1566 / 1.02, -22.4833 / 1.02**3, 15.8788 / 1.02**5),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3465, -1.7098, 0.4232),
)
ROUND_ELEMENTS = 2**25  # that a rank orthogonalizes in a round: ten layers' gate and up of 114M, one layer's of 1B


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Approximately U Vᵀ for each matrix U S Vᵀ in x (n, rows, columns), in x's dtype."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # X Xᵀ is the smaller of the two products
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@dataclass(frozen=True)
class Muon(MatrixRule):
    adamw: AdamW = AdamW()  # for all else; its weight decay is for all
    momentum: float = 0.9
    lr_factor_of_others: float = 2.0

    def matrix_states(self, name, shape, rows):
        return {"momentum": (shape, torch.float32)}

    def update_matrices(self, shards, scalars, step, ranks):
        kinds = {}  # of equal shapes and packing
        for shard in shards:
            kinds.setdefault((shard.rows, shard.shape[1]), []).append(shard)
        n_ranks = dist.get_world_size(ranks.shard) if ranks.shard else 1
        rounds = []
        for kind in kinds.values():
            owned = max(1, min(-(-len(kind) // n_ranks), ROUND_ELEMENTS // kind[0].shape.numel()))  # matrices per rank
            n = n_ranks * owned
            rounds += [self._round(kind[i : i + n], scalars, n_ranks, ranks) for i in range(0, len(kind), n)]
        for i in range(len(rounds) + 2):  # round i is sent, i - 1 orthogonalized, i - 2 received
            for a_round in rounds[max(i - 2, 0) : i + 1][::-1]:
                next(a_round, None)

    def _round(self, shards: list[Shard], scalars: torch.Tensor, n_ranks: int, ranks: Ranks):
        """A generator with three stages; rows are in flight between them."""
        n_rows, n_columns = shards[0].shape
        rows = shards[0].rows
        owned = -(-len(shards) // n_ranks)  # matrices per rank
        rank_rows = -(-n_rows // n_ranks)  # rows per rank, as in FSDP
        # The missing matrices and rows are zeros.
        x = self._directions(shards, scalars[0], owned * n_ranks, rank_rows, ranks)
        received, work = exchange(x, ranks.shard)
        yield
        wait_for(work)
        x = received.view(n_ranks, owned, rank_rows, n_columns).transpose(0, 1).reshape(owned, -1, n_columns)
        for matrices in x[:, :n_rows].split(rows, dim=1):
            matrices.copy_(orthogonalize(matrices))
        x = x.view(owned, n_ranks, rank_rows, n_columns).transpose(0, 1).reshape(-1, rank_rows, n_columns)
        received, work = exchange(x, ranks.shard)
        yield
        wait_for(work)
        side = max(*rows, n_columns)  # the same for all: k and v have no more rows than columns
        for shard, o in zip(shards, received, strict=False):
            if shard.grad.numel():
                direction, factor = self.scaled(o[: len(shard.grad)], shard.states, side, scalars)
                sgdw(shard.parameter, direction, shard.master, scalars, factor, self.adamw.weight_decay)

    def scaled(self, o: torch.Tensor, states: dict, side: int, scalars: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The direction and length of the step at a learning rate of 1, for some rows of O. side: O's longer side."""
        return o, 0.2 * math.sqrt(side)

    def _directions(self, shards, scale, n: int, rank_rows: int, ranks: Ranks) -> torch.Tensor:
        """This rank's rows of u of each matrix, (n, rank_rows, columns), after a step of the momenta."""
        first = shards[0].grad
        dtype = torch.bfloat16 if first.is_cuda else torch.float32
        x = torch.zeros(n, rank_rows, first.shape[1], dtype=dtype, device=first.device)
        finite = scale.isfinite()
        for shard, u in zip(shards, x, strict=False):
            m = shard.states["momentum"]
            g = torch.where(finite, shard.grad.float() * scale, m)  # if not finite, m stays exactly as it is
            u[: len(g)] = self.direction(g, shard, finite, ranks)
        return x

    def direction(self, g: torch.Tensor, shard: Shard, finite: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """u for this rank's rows. May overwrite g, which is the momentum if the gradient is not finite."""
        m = shard.states["momentum"]
        m.lerp_(g, 1 - self.momentum)
        return g.lerp_(m, self.momentum)


def exchange(x: torch.Tensor, group: dist.ProcessGroup | None):
    """Splits x into one equal part per rank and sends part i to rank i. Returns what arrives, once wait_for(work)."""
    if group is None:
        return x, None
    received = torch.empty_like(x)
    return received, dist.all_to_all_single(received, x, group=group, async_op=True)


def wait_for(work) -> None:
    if work is not None:
        work.wait()  # on a GPU the stream waits, not the CPU
