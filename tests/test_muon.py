"""Muon and NorMuon."""

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


def formula(w, m, r, g, lr, t, rule, precondition=lambda u: u):
    """Step t of Muon or NorMuon on one matrix, through its singular values, in float64."""
    m = 0.9 * m + 0.1 * g
    u, s, v = torch.linalg.svd(precondition(0.1 * g + 0.9 * m), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    o = u @ torch.diag(s) @ v
    r = 0.95 * r + 0.05 * o.square().mean(1, keepdim=True)
    step = math.sqrt(max(w.shape)) * o if type(rule) is Muon else o / (r / (1 - 0.95**t)).sqrt()
    return w - lr * (0.1 * w + 0.2 * step), m, r


def train_on_random_gradients(model, optimizer, n_steps=3, watch=lambda gradients, lr: None):
    for step in range(n_steps):
        gradients = {name: torch.randn(p.shape).to(p.dtype) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone()
        watch(gradients, 0.01 * (step + 1))
        optimizer.step(lr=0.01 * (step + 1))


# with a ffn_dim of 16, qkv and gate_up are of one shape; owned: elements at a time
@pytest.mark.parametrize("config, owned", [(CONFIG, 2**25), (CONFIG, 2 * 16 * 24), (replace(CONFIG, ffn_dim=16), 1)])
@pytest.mark.parametrize("rule", [Muon(), NorMuon()], ids=type)
def test_every_published_matrix_takes_the_step_of_the_formula_and_all_else_adamw_s(rule, config, owned, monkeypatch):
    monkeypatch.setattr("optimizers.muon.OWNED", owned)
    models = [llama(config), llama(config)]
    muon, adamw = (OnDevice(m, rule) for m, rule in zip(models, (rule, AdamW()), strict=True))
    matrices = {name: p for name, p in models[0].named_parameters() if name.startswith("layers.") and p.ndim == 2}
    parts = {name: [(w.double(), 0.0, 0.0) for w in p.detach().split(muon.rows[name])]
             for name, p in matrices.items()}  # fmt: skip
    assert sum(map(len, parts.values())) == 7 * config.n_layer

    def watch(gradients, lr):
        for name, p in models[1].named_parameters():
            p.grad = gradients[name].clone()
        adamw.step(2 * lr)
        for name in parts:
            split = gradients[name].double().split(muon.rows[name])
            parts[name] = [formula(*of, g, lr, 100 * lr, rule) for of, g in zip(parts[name], split, strict=True)]

    train_on_random_gradients(models[0], muon, watch=watch)
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if name in parts:
            torch.testing.assert_close(ours.double(), torch.cat([w for w, *_ in parts[name]]), rtol=1e-4, atol=1e-5)
            assert muon.states[name].keys() == rule.matrix_states(name, ours.shape, muon.rows[name]).keys()
        else:
            assert torch.equal(ours, theirs), name


def test_soapmuon_scales_the_momentum_in_the_eigenbasis_of_the_columns(monkeypatch):
    monkeypatch.setattr("optimizers.soapmuon.WIDEST", 16)
    model = llama(CONFIG)
    rule = SoapMuon(interval=2)
    optimizer = OnDevice(model, rule)
    matrices = {name: p for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2}
    exact = {}  # (name, i): w, m, r of NorMuon; covariance, basis, V
    for name, p in matrices.items():
        for i, w in enumerate(p.detach().double().split(optimizer.rows[name])):
            exact[name, i] = [(w, 0.0, 0.0), 0.0, None, 0.0]
    step = 0

    def watch(gradients, lr):
        nonlocal step
        for (name, i), of in exact.items():
            g = gradients[name].double().split(optimizer.rows[name])[i]
            weight, covariance, q, v = of
            covariance = 0.95 * covariance + 0.05 * g.T @ g
            eye = torch.eye(len(covariance), dtype=torch.float64)
            damped = covariance + 1e-2 * covariance.trace() / len(eye) * eye
            if step == 0:
                q = eye
            for _ in range({0: 10, 2: 1, 4: 1}.get(step, 0)):
                q = torch.linalg.qr(damped @ q).Q
            v = 0.95 * v + 0.05 * (g @ q) ** 2
            scale = v.sqrt() + 1e-3 * v.mean(1, keepdim=True).sqrt()
            if g.shape[1] > 16:
                weight = formula(*weight, g, lr, step + 1, rule)
            else:
                weight = formula(*weight, g, lr, step + 1, rule, lambda u, q=q, scale=scale: (u @ q / scale) @ q.T)
            of[:] = weight, covariance, q, v
        step += 1

    train_on_random_gradients(model, optimizer, n_steps=5, watch=watch)
    for name, p in matrices.items():
        expected = torch.cat([exact[name, i][0][0] for i in range(len(optimizer.rows[name]))])
        torch.testing.assert_close(p.double(), expected, rtol=1e-3, atol=1e-4)
        assert ("basis" in optimizer.states[name]) == (p.shape[1] <= 16)


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

    def watch(gradients, lr):
        for name in names:
            layer[name].grad = gradients[f"layers.0.{name}"].clone()
        pytorch.param_groups[0]["lr"] = lr
        pytorch.step()

    before = {name: layer[name].detach().clone() for name in names}
    train_on_random_gradients(ours, optimizer, watch=watch)
    for name in names:
        mine, its = (m.layers[0].get_parameter(name).detach() - before[name] for m in models)
        assert (mine - its).norm() / its.norm() < 0.02, "PyTorch's orthogonalises in bfloat16"
