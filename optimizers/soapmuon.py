"""SoapMuon: NorMuon whose momentum is first scaled in the eigenbasis of the gradient's columns, one side of SOAP.

    R = β₂ R + (1 − β₂) GᵀG        of each matrix's gradient G (rows, columns): which columns move together
    Q ← qr(R Q)                    every `interval` updates: power iteration to R's eigenvectors
    V = β₂ V + (1 − β₂) (G Q)²     Adam's second moment, in that basis
    u ← (u Q / √V) Qᵀ              then NorMuon orthogonalizes u

Muon alone takes every singular vector of one momentum equally far. The statistics of many steps say which of them are
noise. That helps much with batches of 524,288 tokens and not with 2,048 (docs/log.md).

SOAP scales both sides. The columns' side is as good, and fits FSDP, which splits the rows: V and the rotations stay on
the rank of their rows, only GᵀG is summed over the ranks. Each rank has all of R and Q. A matrix of more than WIDEST
columns takes NorMuon's step. β₂ is AdamW's. State of a matrix of (O, C): NorMuon's, 4·O·C and 8·C² bytes.

Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024. https://arxiv.org/abs/2409.11321
"""

from dataclasses import dataclass

import torch

from optimizers.normuon import NorMuon
from optimizers.rule import local_rows, matmul_parts

WIDEST = 4096  # columns: of wider matrices the factorization takes too long, and R and Q too many bytes
DAMPING = 1e-2  # added to R's eigenvalues, times their mean
EPS = 1e-3  # added to √V, times its root mean square in the row


@dataclass(frozen=True)
class SoapMuon(NorMuon):
    interval: int = 10  # updates between two bases

    def matrix_states(self, name, shape, rows):
        states = super().matrix_states(name, shape, rows)
        n_columns = shape[1]
        if n_columns > WIDEST:
            return states
        squares = ((len(rows), n_columns, n_columns), torch.float32)
        return states | {"avg_sq": (shape, torch.float32), "covariance": squares, "basis": squares}

    def update_matrices(self, shards, scalars, step, ranks):
        scale = scalars[0]
        finite = scale.isfinite()
        for shard in shards:
            if "basis" in shard.states:
                g = torch.where(finite, shard.grad.float() * scale, 0.0)
                parts = g.split(local_rows(shard, ranks.shard))
                for part, r, q in zip(parts, shard.states["covariance"], shard.states["basis"], strict=True):
                    r.lerp_(torch.where(finite, ranks.sum(part.T @ part), r), 1 - self.adamw.betas[1])
                    if step % self.interval == 0:
                        q.copy_(torch.where(finite, next_basis(r, q, step == 0), q))
        super().update_matrices(shards, scalars, step, ranks)

    def direction(self, g, shard, finite, ranks):
        if "basis" not in shard.states:
            return super().direction(g, shard, finite, ranks)
        basis = shard.states["basis"]
        v = shard.states["avg_sq"]
        part_rows = local_rows(shard, ranks.shard)
        square = matmul_parts(g, basis, part_rows).square_()
        v.lerp_(torch.where(finite, square, v), 1 - self.adamw.betas[1])
        u = super().direction(g, shard, finite, ranks)
        length = v.sqrt() + EPS * v.mean(dim=1, keepdim=True).sqrt()
        return matmul_parts(matmul_parts(u, basis, part_rows) / length.clamp(min=1e-30), basis.mT, part_rows)


def next_basis(r: torch.Tensor, q: torch.Tensor, first: bool) -> torch.Tensor:
    """A step of power iteration from q (columns, columns) to R's eigenvectors, the largest first; ten from I if first.

    With damping: what few gradients leave at zero in R would be rounding error, another one on each number of ranks.
    """
    eye = torch.eye(len(r), device=r.device)
    r = r + DAMPING * r.diagonal().mean() * eye
    if not first:
        return torch.linalg.qr(r @ q).Q
    q = eye
    for _ in range(10):
        q = torch.linalg.qr(r @ q).Q
    return q
