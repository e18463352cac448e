"""APOLLO: the gradients' rows, scaled as AdamW would scale them."""

import math
import zlib

import pytest
import torch

from model import Llama
from optimizers.adamw import AdamW
from optimizers.apollo import GROWTH, Apollo
from optimizers.on_gpu import OnGPU
from optimizers.optimizer import Optimizer
from optimizers.rule import is_matrix_of_a_block
from tests.test_galore import CONFIG, RANK

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


def set_gradients(model, factor=1.0):
    for p in model.parameters():
        p.grad = (factor * torch.randn(p.shape)).to(p.dtype)


def test_every_row_takes_the_step_of_the_formula_in_float64():
    model = Llama(CONFIG)
    model.init_weights(0)
    optimizer = Optimizer(model, Apollo(AdamW(weight_decay=0.1), RANK, 3), OnGPU())
    names = [name for name, p in model.named_parameters() if is_matrix_of_a_block(name, p.shape)]
    exact = {name: [model.get_parameter(name).detach().double(), 0.0, 0.0, math.inf] for name in names}
    limited = 0
    for t in range(1, 6):
        set_gradients(model, t)  # so that steps grow, and some are limited
        for name, (w, m, v, before) in exact.items():
            g = model.get_parameter(name).grad.double()
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {(t - 1) // 3}".encode()))
            r = g @ torch.randn(g.shape[1], RANK, generator=generator).double() * RANK**-0.5
            m, v = 0.9 * m + 0.1 * r, 0.95 * v + 0.05 * r * r
            n = m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
            step = (g.shape[1] / RANK) ** 0.5 * (n.norm(dim=1) / r.norm(dim=1))[:, None] * g
            limited += step.norm().item() > GROWTH * before
            step *= min(1.0, GROWTH * before / step.norm().item())
            exact[name] = [w - 0.01 * (0.1 * w + step), m, v, step.norm().item()]
        optimizer.step(lr=0.01)
    assert 0 < limited < 4 * len(names)
    for name, (w, *_, norm) in exact.items():
        torch.testing.assert_close(model.get_parameter(name).detach().double(), w, rtol=1e-5, atol=1e-6)
        states = optimizer.place.states[name]
        assert {key: tuple(x.shape) for key, x in states.items()} == {
            "exp_avg": (len(w), RANK), "exp_avg_sq": (len(w), RANK), "norm": (1,)
        }  # fmt: skip
        assert states["norm"].item() == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("tiny", [1e-10, 1e-22, 1e-25, 1e-37, 0.0])
def test_a_row_whose_gradient_has_almost_vanished_takes_no_giant_step(tiny):
    """Its squares are 0 in float32, but its moments, from the previous step, are not."""
    model = Llama(CONFIG)
    model.init_weights(0)
    optimizer = Optimizer(model, Apollo(AdamW(weight_decay=0.0), RANK), OnGPU())
    weight = model.layers[0].attn.o_proj.weight
    for factor in (1.0, tiny):
        set_gradients(model)
        weight.grad[0] *= factor
        before = weight.detach().clone()
        optimizer.step(0.1)
    steps = (weight.detach() - before).norm(dim=1)
    assert steps[0] <= 2 * steps[1:].max(), steps
