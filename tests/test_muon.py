"""Muon, NorMuon and SoapMuon."""

import math
from dataclasses import replace

import pytest
import torch

from model import LlamaConfig
from optimizers.adamw import AdamW
from optimizers.muon import POLAR_EXPRESS, Muon, orthogonalize
from optimizers.normuon import NorMuon
from optimizers.on_device import OnDevice
from optimizers.soapmuon import SoapMuon
from tests.test_optimizers import llama

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

CONFIG = LlamaConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=16, ffn_dim=24, vocab_size=11, block_size=8)


def test_orthogonalized_matrices_have_singular_values_near_one():
    for shape in ((3, 16, 16), (2, 8, 24), (2, 24, 8)):
        x = torch.randn(shape, dtype=torch.float64)
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        found = orthogonalize(x)
        assert (torch.linalg.svdvals(found) - 1).abs().max() < 0.15, shape
        # the same singular vectors: off the diagonal only rounding is left
        inner = u.mT @ found @ v.mT
        assert (inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max() < 1e-9
    assert orthogonalize(torch.zeros(1, 4, 4)).abs().max() == 0
    # one singular value of nearly 1 and small ones, as after the division by the norm
    small = torch.cat([torch.tensor([1.0]), torch.logspace(-3, -1.5, 31)]).double()
    found = torch.linalg.svdvals(orthogonalize(torch.diag(small)[None]))
    assert found.min() > 0.84 and found.max() < 1.15, found


class Exact:
    """One matrix in float64, orthogonalized through its singular values."""

    def __init__(self, w, rule):
        self.w = w.double()
        self.rule = rule
        self.m = self.r = self.covariance = self.v = 0.0
        self.q = torch.eye(w.shape[1], dtype=torch.float64)

    def step(self, g, lr, t):
        self.m = 0.9 * self.m + 0.1 * g
        u = 0.1 * g + 0.9 * self.m
        if type(self.rule) is SoapMuon and u.shape[1] <= 16:
            u = self.scaled_in_eigenbasis(u, g, t)
        u, s, v = torch.linalg.svd(u, full_matrices=False)
        s = s / s.square().sum().sqrt()
        for a, b, c in POLAR_EXPRESS:
            s = a * s + b * s**3 + c * s**5
        o = u @ torch.diag(s) @ v
        self.r = 0.95 * self.r + 0.05 * o.square().mean(1, keepdim=True)
        if type(self.rule) is Muon:
            direction = math.sqrt(max(self.w.shape)) * o
        else:
            direction = o / (self.r / (1 - 0.95**t)).sqrt()
        self.w = self.w - lr * (0.1 * self.w + 0.2 * direction)

    def scaled_in_eigenbasis(self, u, g, t):
        self.covariance = 0.95 * self.covariance + 0.05 * g.T @ g
        damped = self.covariance + 1e-2 * self.covariance.diagonal().mean() * torch.eye(len(self.q))
        for _ in range({1: 10, 3: 1, 5: 1}.get(t, 0)):  # at an interval of 2
            self.q = torch.linalg.qr(damped @ self.q).Q
        self.v = 0.95 * self.v + 0.05 * (g @ self.q) ** 2
        return u @ self.q / (self.v.sqrt() + 1e-3 * self.v.mean(1, keepdim=True).sqrt()) @ self.q.T


def train_on_random_gradients(model, optimizer, watch):
    for t in range(1, 6):
        gradients = {name: torch.randn(p.shape).to(p.dtype) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone()
        watch(gradients, 0.01 * t, t)
        optimizer.step(lr=0.01 * t)


# with a ffn_dim of 16, qkv and gate_up are of one shape; owned: elements at a time
@pytest.mark.parametrize("config, owned", [(CONFIG, 2**25), (CONFIG, 2 * 16 * 24), (replace(CONFIG, ffn_dim=16), 1)])
@pytest.mark.parametrize("rule", [Muon(), NorMuon(), SoapMuon(interval=2)], ids=type)
def test_every_published_matrix_takes_the_step_of_the_formula_and_all_else_adamw_s(rule, config, owned, monkeypatch):
    monkeypatch.setattr("optimizers.muon.ROUND_ELEMENTS", owned)
    monkeypatch.setattr("optimizers.soapmuon.WIDEST", 16)
    models = [llama(config), llama(config)]
    before = llama(config)
    muon, adamw = (OnDevice(m, rule) for m, rule in zip(models, (rule, AdamW()), strict=True))
    matrices = {}
    for name, p in models[0].named_parameters():
        if name.startswith("layers.") and p.ndim == 2:
            matrices[name] = [Exact(w, rule) for w in p.detach().split(muon.rows[name])]
    assert sum(map(len, matrices.values())) == 7 * config.n_layer

    def watch(gradients, lr, t):
        for name, p in models[1].named_parameters():
            p.grad = gradients[name].clone()
        adamw.step(2 * lr)
        for name, parts in matrices.items():
            for matrix, g in zip(parts, gradients[name].double().split(muon.rows[name]), strict=True):
                matrix.step(g, lr, t)

    train_on_random_gradients(models[0], muon, watch)
    tolerance = 1e-2 if type(rule) is SoapMuon else 1e-5  # small eigenvalues' directions are uncertain in float32
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if name in matrices:
            exact = torch.cat([matrix.w for matrix in matrices[name]])
            off = (ours.double() - exact).norm() / (exact - before.get_parameter(name)).norm()
            assert off < tolerance, f"{name} is off by {off:.1e} of its way"
            assert muon.states[name].keys() == rule.matrix_states(name, ours.shape, muon.rows[name]).keys()
        else:
            assert torch.equal(ours, theirs), name


def test_rows_without_a_gradient_stay_finite():
    for rule in (Muon(), NorMuon(), SoapMuon()):
        model = llama(CONFIG)
        optimizer = OnDevice(model, rule)
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
            p.grad[1:3] = 0.0
        optimizer.step(lr=0.01)
        assert all(x.isfinite().all() for x in optimizer.tensors().values()), rule


def test_with_its_coefficients_it_follows_pytorch_s_muon(monkeypatch):
    monkeypatch.setattr("optimizers.muon.POLAR_EXPRESS", ((3.4445, -4.7750, 2.0315),) * 5)
    models = [llama(CONFIG), llama(CONFIG)]
    ours, theirs = models
    optimizer = OnDevice(ours, Muon())
    names = ["attn.o_proj.weight", "mlp.down_proj.weight"]  # PyTorch's does not know packed matrices
    layer = dict(theirs.layers[0].named_parameters())
    pytorch = torch.optim.Muon(
        [layer[name] for name in names], weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )

    def watch(gradients, lr, t):
        for name in names:
            layer[name].grad = gradients[f"layers.0.{name}"].clone()
        pytorch.param_groups[0]["lr"] = lr
        pytorch.step()

    before = {name: layer[name].detach().clone() for name in names}
    train_on_random_gradients(ours, optimizer, watch)
    for name in names:
        mine, its = (m.layers[0].get_parameter(name).detach() - before[name] for m in models)
        assert (mine - its).norm() / its.norm() < 0.02, "PyTorch's orthogonalizes in bfloat16"


def test_a_model_without_layers_is_refused_not_left_to_adamw():
    """As torch.compile(model), whose parameters have other names."""
    model = torch.nn.Linear(4, 4)
    optimizer = OnDevice(model, Muon())
    model(torch.ones(4)).sum().backward()
    with pytest.raises(AssertionError, match="no matrix is named layers"):
        optimizer.step(lr=0.1)
