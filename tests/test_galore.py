"""GaLore: AdamW on projected gradients."""

import pytest
import torch

from kernels.linear import matrix_rows
from model import Llama, LlamaConfig
from optimizers.adamw import AdamW
from optimizers.galore import GaLore
from optimizers.on_device import OnDevice

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

CONFIG = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=16, ffn_dim=24, vocab_size=11, block_size=8)
RANK = 4


def low_rank(shape):
    """Random, each singular value a quarter of the one before, so the basis is well determined."""
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    return u @ torch.diag(4.0 ** -torch.arange(min(shape), dtype=torch.float64)) @ v


def set_gradients(model):
    rows = matrix_rows(model)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            parts = [low_rank((n_rows, p.shape[1])) for n_rows in rows[name]]
            p.grad = torch.cat(parts).to(p.dtype)
        else:
            p.grad = torch.randn(p.shape).to(p.dtype)


def test_every_published_matrix_takes_the_step_of_the_formula_in_float64():
    model = Llama(CONFIG)
    model.init_weights(0)
    optimizer = OnDevice(model, GaLore(AdamW(weight_decay=0.1), RANK, 3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    exact = {}  # (name, i): w, basis, m, v
    for name, p in model.named_parameters():
        if name.startswith("layers.") and p.ndim == 2:
            for i, w in enumerate(p.detach().double().split(optimizer.rows[name])):
                exact[name, i] = [w, None, 0.0, 0.0]
    assert len(exact) == 7 * CONFIG.n_layer
    for t in range(1, 6):
        set_gradients(model)
        for (name, i), state in exact.items():
            p = model.get_parameter(name)
            g = p.grad.double().split(optimizer.rows[name])[i]
            w, q, m, v = state
            if t in (1, 4):
                new = torch.linalg.svd(g, full_matrices=False).Vh[:RANK].T
                q = new if q is None else new * torch.where((new * q).sum(0) < 0, -1.0, 1.0)
            r = g @ q
            m = 0.9 * m + 0.1 * r
            v = 0.95 * v + 0.05 * r * r
            n = m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
            state[:] = w - 0.01 * (0.1 * w + (p.shape[1] / RANK) ** 0.5 * n @ q.T), q, m, v
        optimizer.step(lr=0.01)
    for name, p in model.named_parameters():
        if (name, 0) in exact:
            expected = torch.cat([exact[name, i][0] for i in range(len(optimizer.rows[name]))])
            off = (p.detach().double() - expected).norm() / (expected - before[name]).norm()
            assert off < 1e-2, f"{name} is off by {off:.1e} of its way: more than the iteration's error"
            states = optimizer.states[name]
            assert states["exp_avg"].shape == states["exp_avg_sq"].shape == (len(p), RANK)
