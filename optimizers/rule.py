"""The interface of an update rule: all that on_device.py, on_cpu.py, checkpoints and memory.py use of it.

A new rule needs a class in a file beside adamw.py, a kernel (or kernels/sgdw.py's), its name in train.py's setting
`optimizer` and a case in __init__.py. With step_on_cpu and supports_offload = True it also works with --offload.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

States = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name: shape and dtype


class Ranks(NamedTuple):
    """The ranks that hold the rows of one copy of the model, and those that hold this rank's rows in each copy."""

    shard: dist.ProcessGroup | None = None  # None without FSDP
    replicas: dist.ProcessGroup | None = None  # None except in hybrid sharding

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over the rows' ranks, in place. Replicas may add in different orders: all take the first's sum."""
        if self.shard is not None:
            dist.all_reduce(x, group=self.shard)
        if self.replicas is not None:
            dist.broadcast(x, group=self.replicas, group_src=0)
        return x


class Shard(NamedTuple):
    """This rank's part of one parameter in an update: some of its rows, or none."""

    name: str
    shape: torch.Size  # of the whole parameter
    rows: tuple[int, ...]  # of each matrix packed in the whole parameter
    parameter: torch.Tensor
    grad: torch.Tensor
    master: torch.Tensor  # float32 (a float32 parameter itself), or int16, the lower half of a bfloat16 one's
    states: dict[str, torch.Tensor]


class Rule:
    supports_offload = False  # True if step_on_cpu computes the same as step_on_device
    c_files = ()  # files in kernels/ that step_on_cpu uses

    def states(self, name: str, shape: tuple[int, ...], rows: tuple[int, ...]) -> States:
        """The states of a whole parameter, which start as zeros. rows: of each matrix packed in it.

        Under FSDP a state with as many rows as the parameter is split like it; each rank has the others whole.
        """
        raise NotImplementedError

    def scalars(self, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Scalars that change with each update: float32, on t's device. t: the number of this update, from 1."""
        return ()

    def update(self, shards: list[Shard], scalars: torch.Tensor, step: int, ranks: Ranks) -> None:
        """One update of all parameters, in place, on their device. Override it for rules that need whole matrices.

        scalars: float32: the gradients' scale, the learning rate, scalars(t). Unless the scale is finite, nothing may
        change. step: how many updates came before this one, skipped ones included.
        """
        for shard in shards:
            if shard.grad.numel():  # a rank may hold nothing of a small parameter
                self.step_on_device(shard.parameter, shard.grad, shard.master, shard.states, scalars)

    def step_on_device(self, parameter, grad, master, states, scalars) -> None:
        """One update of one parameter, as above."""
        raise NotImplementedError

    def step_on_cpu(self, parameter, grad, master, states, scale: float, lr: float, t: int) -> None:
        """The same on the CPU, for any rows. scale is finite, master float32; parameter may share grad's memory."""
        raise NotImplementedError


class MatrixRule(Rule):
    """A rule for the blocks' matrices only. `adamw` updates all else: embedding, head and norms.

    A subclass defines adamw, and matrix_states and update_matrices: states and update for these matrices.
    """

    lr_factor_of_others = 1.0  # AdamW's learning rate divided by the matrices'

    def states(self, name, shape, rows):
        if is_matrix_of_a_block(name, shape):
            return self.matrix_states(name, shape, rows)
        return self.adamw.states(name, shape, rows)

    def scalars(self, t):
        return self.adamw.scalars(t)

    def update(self, shards, scalars, step, ranks):
        matrices = [x for x in shards if is_matrix_of_a_block(x.name, x.shape)]
        others = [x for x in shards if not is_matrix_of_a_block(x.name, x.shape)]
        assert matrices, f"no matrix is named layers.*, but {shards[0].name}: give Optimizer the Llama itself"
        adamw_scalars = scalars.clone()
        adamw_scalars[1] *= self.lr_factor_of_others
        self.adamw.update(others, adamw_scalars, step, ranks)
        self.update_matrices(matrices, scalars, step, ranks)


def is_matrix_of_a_block(name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith("layers.") and len(shape) == 2


def local_rows(shard: Shard, group: dist.ProcessGroup | None) -> list[int]:
    """How many of this rank's rows belong to each matrix packed in a weight. FSDP splits like torch.chunk."""
    n_ranks = dist.get_world_size(group) if group else 1
    rank = dist.get_rank(group) if group else 0
    first = -(-shard.shape[0] // n_ranks) * rank
    # where each matrix begins and ends, counted from this rank's first row, as far as the rank has it
    bounds = [min(max(row, 0), len(shard.grad)) for row in accumulate(shard.rows, initial=-first)]
    return [end - begin for begin, end in pairwise(bounds)]


def matmul_parts(x: torch.Tensor, matrices: torch.Tensor, n_rows: list[int]) -> torch.Tensor:
    """x (rows, C) in parts of n_rows, each multiplied by its own of the matrices (parts, C, D). Returns (rows, D)."""
    return torch.cat([part @ matrix for part, matrix in zip(x.split(n_rows), matrices, strict=True)])
