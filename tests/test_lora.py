"""LoRA and QLoRA from settings to checkpoints: against dense weights, against peft, after a resume, on two ranks."""

import json
import shutil

import pytest
import torch
import transformers

from convert import convert
from kernels import Linear, NF4LoRALinear
from lora import add_lora
from model import Llama, LlamaConfig
from runtime.checkpoint import load_model
from tests.datasets import toy_dataset
from tests.runs import SHORT, SMALL, assert_close, damage, error_of, finish, losses, prose, run, step_losses

TINY = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=64, vocab_size=64, block_size=16)
RUN = SMALL | SHORT | dict(gradient_accumulation_steps=2, lora_rank=4, lora_alpha=10, learning_rate=0.03)
BASES = {name: {"quantize_base": name} for name in ("none", "nf4")} | {"float8": {"fp8": True}}
each_run = pytest.mark.parametrize("name", BASES)


def test_frozen_weights_cost_two_thirds_of_the_flops_and_nf4_counts_whole_weights():
    with torch.device("meta"):
        plain = Llama(TINY)
        models = [Llama(TINY) for _ in range(2)]
    two_thirds = plain.flops_per_token(0) * 2 // 3
    for model, quantize_base in zip(models, ("none", "nf4"), strict=True):
        add_lora(model, 3, 5.0, quantize_base)
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert model.flops_per_token(0) == two_thirds + 6 * adapters
        assert model.n_params() == plain.n_params() + adapters
    assert plain.requires_grad_(False).flops_per_token(0) == two_thirds


def test_adapters_begin_as_peft_has_them_from_the_seed():
    def made(rank, seed):
        model = Llama(TINY)
        add_lora(model, rank, 8.0)
        torch.manual_seed(rank)
        model.init_weights(seed)
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    first = made(3, 1)
    again = made(3, 1)
    other = made(3, 2)
    for name, x in first.items():
        assert torch.equal(x, again[name])
        if name.endswith("lora_b"):
            assert not x.any()
        else:
            bound = x.shape[1] ** -0.5
            assert 0.9 * bound < x.abs().max() <= bound and not torch.equal(x, other[name])


# ----------------------------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def capitals(tmp_path_factory):
    """The same words in capitals, which the published weights were not trained on."""
    folder = tmp_path_factory.mktemp("capitals")
    toy_dataset(folder, [prose(1, 10_000).upper()], [prose(2, 5000).upper()])
    return folder


@pytest.fixture(scope="module")
def base(text_data, tmp_path_factory):
    """A folder of published weights."""
    folder = tmp_path_factory.mktemp("base")
    finish(SMALL | SHORT | {"dataset": text_data, "out_dir": folder / "run", "learning_rate": 0.01})
    convert(folder / "run" / "step_000008", folder / "published", "float32")
    return folder / "published"


@pytest.fixture(scope="module")
def trained(base, capitals, tmp_path_factory):
    """Runs with a base in float32, NF4 and float8: 8 steps, a checkpoint after 4, one folder each."""
    common = RUN | {"dataset": capitals, "init_from": base}
    folders = {name: tmp_path_factory.mktemp(name) for name in BASES}
    for name, folder in folders.items():
        finish(common | {"out_dir": folder} | BASES[name])
    return folders


def test_only_adapters_are_saved_and_the_loss_falls(trained):
    for name, folder in trained.items():
        saved = sorted(path.name for path in (folder / "step_000008").iterdir())
        assert saved == [
            "adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors.index.json",
            "base_config.json", "optimizer.safetensors", "run.json",
            "tokenizer.json", "tokenizer_config.json",
        ]  # fmt: skip
        found = step_losses(folder)
        assert found[-1] < found[0] - 0.05, (name, found)


@each_run
def test_resume_repeats_losses_bit_for_bit(name, train, trained, capitals, tmp_path, plain_pytorch_on_one_core):
    shutil.copytree(trained[name] / "step_000004", tmp_path / "out/step_000004")
    train(**RUN | {"dataset": capitals} | BASES[name])  # the checkpoint names its base
    assert losses(tmp_path / "out") == [line for line in losses(trained[name]) if line["step"] > 4]


@pytest.mark.parametrize("name", ["nf4", "float8"])
def test_two_ranks_resume_one_ranks_run_with_its_losses(name, trained, capitals, tmp_path):
    shutil.copytree(trained[name] / "step_000004", tmp_path / "step_000004")
    finish(RUN | {"dataset": capitals, "out_dir": tmp_path} | BASES[name], ranks=2)
    alone = step_losses(trained[name])[4:]
    assert abs(step_losses(tmp_path) - alone).max() < 1e-5
    one, two = (load_model(folder / "step_000008") for folder in (trained[name], tmp_path))
    for (key, x), y in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        same = torch.equal(x.view(torch.uint8), y.view(torch.uint8))  # a NaN of float8 is a code like any other
        assert same if "lora" not in key else (x - y).abs().max() < 1e-4, key


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_run
def test_two_gpus_give_the_losses_of_one(name, base, capitals, tmp_path):
    """And exactly the same, whether or not each gathers the frozen weights again in backward."""
    settings = RUN | {"dataset": capitals, "init_from": base, "device": "cuda", "learning_rate": 3e-3, "max_iters": 20}
    settings |= {"dtype": "bfloat16", "keep_last": 0} | BASES[name]
    finish(settings | {"out_dir": tmp_path / "one"})
    for sharding in ("zero3", "zero2"):
        finish(settings | {"out_dir": tmp_path / sharding, "sharding": sharding}, ranks=2)
    assert_close(step_losses(tmp_path / "one"), step_losses(tmp_path / "zero3"), 2e-3)
    assert losses(tmp_path / "zero3") == losses(tmp_path / "zero2")


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize("changes", [
    {"offload": "optimizer", "quantize_base": "nf4", "activation_checkpointing": "full"}, {"offload": "all"},
    {"dtype": "bfloat16"}, {"quantize_base": "nf4", "fp8": True},
], ids=str)  # fmt: skip
def test_lora_trains_with(changes, base, trained, capitals, tmp_path):
    done = run(RUN | {"dataset": capitals, "out_dir": tmp_path, "init_from": base} | changes)
    a = 2 * 4 * (6 * 32 + 64)  # layers, rank, and the inputs of q, k, v, o, gate, up and down
    b = 2 * 4 * (2 * 32 + 2 * 16 + 2 * 64 + 32)  # and their outputs
    assert f" parameters, of which {a + b:,} are trained; " in done.stdout, done.stdout + done.stderr
    expected = step_losses(trained[changes.get("quantize_base", "none")])
    apart = abs(step_losses(tmp_path) - expected)
    if "fp8" in changes:  # a learning rate this large magnifies rounding for a step
        assert apart.mean() < 0.05
    else:
        assert apart.max() < (0.05 if "dtype" in changes else 1e-5)


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize("name", ["none", "float8"])
def test_peft_and_transformers_load_a_checkpoint_and_give_our_logits(name, base, trained):
    import peft  # takes seconds

    folder = trained[name] / "step_000008"
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        ours = load_model(folder)(tokens)
        published = load_model(base)(tokens)
        theirs = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
        assert (peft.PeftModel.from_pretrained(theirs, folder)(tokens).logits - ours).abs().max() < 1e-5
        auto = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert (auto(tokens).logits - ours).abs().max() < 1e-5
    assert (ours - published).abs().max() > 0.01


def test_convert_merges_adapters_into_the_weights_that_they_were_trained_on(base, trained, tmp_path, sample):
    model = load_model(trained["nf4"])
    tokens = torch.randint(0, 256, (1, 16))
    convert(trained["nf4"] / "step_000008", tmp_path / "merged", "float32")
    assert not list((tmp_path / "merged").glob("adapter*"))
    merged = load_model(tmp_path / "merged")
    assert isinstance(model.layers[0].mlp.down_proj, NF4LoRALinear) and type(merged.layers[0].mlp.down_proj) is Linear
    assert (merged(tokens) - model(tokens)).abs().max() < 1e-5
    assert (merged(tokens) - load_model(base)(tokens)).abs().max() > 1e-3
    texts = [sample(out_dir=folder, max_new_tokens=20)[0] for folder in (trained["nf4"], tmp_path / "merged", base)]
    assert texts[0] == texts[1] != texts[2]


def test_in_another_dtype_the_four_bits_are_those_that_the_adapters_were_trained_on(trained):
    exact, rounded = (load_model(trained["nf4"], dtype=dtype) for dtype in (torch.float32, torch.float16))
    for layer in (0, 1):
        parts = zip(*(model.layers[layer].attn.o_proj.tensors()[:4] for model in (exact, rounded)), strict=True)
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in parts)


def test_a_run_starts_from_another_runs_adapters(train, trained, capitals, tmp_path, plain_pytorch_on_one_core):
    folder = trained["none"] / "step_000008"
    train(**RUN | {"dataset": capitals, "init_from": folder, "max_iters": 2})
    assert step_losses(tmp_path / "out")[0] < step_losses(trained["none"])[0] - 0.05
    ours, theirs = (path / "adapter_config.json" for path in (tmp_path / "out/step_000002", folder))
    assert json.loads(ours.read_text()) == json.loads(theirs.read_text())


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize("changes, sentence", [
    ({"lora_rank": 8}, "has lora_rank 4"), ({"lora_alpha": 4}, "has lora_alpha 10.0"), ({"lora_rank": 0}, "lora_rank"),
    ({"quantize_base": "nf4"}, "has quantize_base none"),
], ids=str)  # fmt: skip
def test_adapters_of_another_kind_are_refused(changes, sentence, train, capsys, trained, tmp_path):
    shutil.copytree(trained["none"] / "step_000008", tmp_path / "out" / "step_000008")
    assert sentence in error_of(train, capsys, **RUN | changes)


def test_the_base_is_where_adapter_config_says_and_undamaged(
    base, train, trained, capsys, tmp_path, plain_pytorch_on_one_core
):
    checkpoint = shutil.copytree(trained["none"] / "step_000004", tmp_path / "out/step_000004")
    config = checkpoint / "adapter_config.json"
    content = config.read_text()
    assert json.loads(content)["base_model_name_or_path"] == str(base)
    moved = shutil.copytree(base, tmp_path / "moved")

    def message(path):
        config.write_text(content.replace(str(base), str(path)))
        return error_of(train, capsys, **RUN)

    advice = f"set base_model_name_or_path in {config} to the folder of their base"
    assert f"{tmp_path}/gone, which are not there: {advice}" in message(tmp_path / "gone")
    damage(tmp_path / "moved/model.safetensors")
    assert f"{tmp_path}/moved/model.safetensors is not what was saved" in message(moved)
    assert checkpoint.exists(), "the damage is not its own"
    shutil.copytree(base, moved, dirs_exist_ok=True)
    assert torch.equal(load_model(checkpoint).tok_embeddings.weight, load_model(base).tok_embeddings.weight)
    train(**RUN | {"max_iters": 5})
    saved = json.loads((tmp_path / "out/step_000005/adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(moved)
