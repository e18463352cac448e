"""GaLore: AdamW on the blocks' gradients projected to a few columns, so its moments have galore_rank columns each.

    R = G Q      N = Adam's step for R      w = w − lr · (λ w + √(C / r) · N Qᵀ)

The columns of Q (C, r) are the leading right singular vectors of the gradient G (O, C) of one published matrix (q, k,
v, gate and up each by itself), renewed every `interval` updates. They come from subspace iteration, which starts
from the last Q (Q ← qr(Gᵀ G Q)) and ends with the eigenvectors of (G Q)ᵀ(G Q): products with G and small
factorizations; a full SVD of 8B's matrices would take minutes.

√(C / r) makes N Qᵀ (r numbers of about 1 in C directions) as long as AdamW's step: so learning rate and weight decay
are AdamW's. (The paper leaves it out, with a scale of 0.25 and a learning rate of 0.01.)

Choose r below the rank of G, which is small if there is little data: in the columns beyond it R is only rounding error,
which Adam's step enlarges to full length.

The paper projects the shorter side. Here it is always the columns, because FSDP splits the rows: R, the moments and N
then stay on the rank of their rows, and only sums of (columns, rank) travel, when Q is renewed. Each rank has all of Q.
State for a matrix of (O, C): AdamW's of (O, r), in 8 bits only if r is a multiple of 256, and 4·C·r bytes. Embedding,
head and norms keep AdamW.

Zhao et al., GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, 2024. https://arxiv.org/abs/2403.03507
Halko et al., Finding Structure with Randomness, 2011 (subspace iteration). https://arxiv.org/abs/0909.4061
"""

import zlib
from dataclasses import dataclass

import torch

from kernels.sgdw import sgdw
from optimizers.adamw import AdamW
from optimizers.rule import MatrixRule, Ranks, local_rows, matmul_parts

ITERATIONS = 4  # each shrinks what is left of a smaller singular value by the square of its ratio to a larger one


@dataclass(frozen=True)
class GaLore(MatrixRule):
    adamw: AdamW = AdamW()
    rank: int = 128
    interval: int = 200  # updates between two bases

    def matrix_states(self, name, shape, rows):
        n_rows, n_columns = shape
        basis = (len(rows), n_columns, self.rank)
        return self.adamw.states(name, (n_rows, self.rank), rows) | {"basis": (basis, torch.float32)}

    def update_matrices(self, shards, scalars, step, ranks):
        # At a learning rate of -1 AdamW turns a zero into Adam's step. Zeros do not decay.
        adam_scalars = scalars.clone()
        adam_scalars[1] = -1.0
        for shard in shards:
            moments = dict(shard.states)
            bases = moments.pop("basis")
            grad = shard.grad.float()
            part_rows = local_rows(shard, ranks.shard)  # of each matrix packed in the weight, on this rank
            if step % self.interval == 0:
                seed = None if step else zlib.crc32(shard.name.encode())
                for g, q in zip(grad.split(part_rows), bases, strict=True):
                    renew(q, g, scalars[0].isfinite(), seed, ranks)
            if grad.numel():
                projected = matmul_parts(grad, bases, part_rows)
                n = torch.zeros_like(projected)
                self.adamw.step_on_device(n, projected, n, moments, adam_scalars)
                direction = matmul_parts(n, bases.mT, part_rows)
                scale = (shard.shape[1] / self.rank) ** 0.5
                sgdw(shard.parameter, direction, shard.master, scalars, scale, self.adamw.weight_decay)


def renew(basis: torch.Tensor, grad: torch.Tensor, finite: torch.Tensor, seed: int | None, ranks: Ranks) -> None:
    """Sets basis (columns, rank) to the leading right singular vectors of a matrix; grad is this rank's rows of it.

    seed: for the first basis; None: start from the current one. Unless finite, nothing changes. Waits for the GPU.
    """
    grad = torch.where(finite, grad, 0.0)
    q = basis
    if seed is not None:
        generator = torch.Generator(basis.device).manual_seed(seed)
        q = torch.randn(basis.shape, generator=generator, device=basis.device, dtype=torch.float32)
    for _ in range(ITERATIONS):
        q = torch.linalg.qr(ranks.sum(grad.T @ (grad @ q))).Q
    projected = grad @ q
    q = (q @ torch.linalg.eigh(ranks.sum(projected.T @ projected)).eigenvectors).flip(1)  # the largest first
    q = q * torch.where((q * basis).sum(0) < 0, -1.0, 1.0)  # so that the moments keep their signs
    basis.copy_(torch.where(finite, q, basis))
