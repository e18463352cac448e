"""Published folders that are not quite like Llama 3's: read as transformers reads them, or refused with an error."""

import json

import pytest
import transformers
from safetensors.torch import load_file, save_file

from convert import convert
from runtime.checkpoint import load_model, open_folder
from runtime.hf_config import DEFAULTS, read_config
from tests.published import SCALING, assert_same_model, edit_config, publish

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def test_defaults_are_those_of_transformers():
    theirs = transformers.LlamaConfig().to_dict()
    theirs["rope_theta"] = theirs["rope_parameters"]["rope_theta"]
    assert {name: theirs[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("missing", [
    "num_key_value_heads", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "head_dim", "attention_bias",
    "max_position_embeddings", "mlp_bias",
])  # fmt: skip
def test_missing_config_fields_default_as_in_transformers(tmp_path, missing):
    publish(tmp_path, num_key_value_heads=4, tie_word_embeddings=False, rope_scaling=None)
    edit_config(tmp_path, **{missing: None})
    assert_same_model(tmp_path, tmp_path)


@pytest.mark.parametrize("old", [
    {"rope_theta": 50000.0, "rope_scaling": {"type": "llama3", **SCALING}},
    {"rope_theta": 50000.0, "rope_scaling": {"rope_type": "llama3", "type": "llama3", **SCALING}},
    {"rope_scaling": {"rope_type": "llama3", **SCALING}},  # theta: 10,000
    {"rope_theta": 50000, "rope_scaling": {"type": "default"}},
    {"rope_theta": 50000.0},
    {},
])  # fmt: skip
def test_rope_as_older_versions_write_it(tmp_path, old):
    publish(tmp_path)
    edit_config(tmp_path, rope_parameters=None, **old)
    assert_same_model(tmp_path, tmp_path)


def test_the_context_before_stretching_is_written_as_the_int_that_transformers_expects(tmp_path):
    publish(tmp_path / "theirs", rope_parameters={"rope_type": "llama3", "rope_theta": 777.0, **SCALING})
    convert(tmp_path / "theirs", tmp_path / "ours", "float32")
    written = json.loads((tmp_path / "ours/config.json").read_text())["rope_scaling"]
    assert isinstance(written["original_max_position_embeddings"], int), written


LLAMA3 = {"rope_type": "llama3", **SCALING}
NEW = [None, {}, {"rope_type": "default", "rope_theta": 777.0}, {"rope_theta": 777.0, **LLAMA3}]
OLD = [None, {}, {"type": "default"}, {"type": "llama3", **SCALING, "factor": 2.0}, {"rope_theta": 55.0, **LLAMA3}]
OLD += [{name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}]


@pytest.mark.parametrize("theta", [None, 500.0])
@pytest.mark.parametrize("new", NEW, ids=str)
def test_rope_in_two_places_is_read_as_in_transformers(tmp_path, new, theta):
    publish(tmp_path)
    for old in OLD:
        edit_config(tmp_path, rope_parameters=new, rope_scaling=old, rope_theta=theta)
        assert_same_model(tmp_path, tmp_path)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "proportional", None])
def test_other_kinds_of_rope_are_refused_in_either_place(tmp_path, kind, name, place):
    publish(tmp_path, rope_scaling=None)  # rope_parameters: default
    edit_config(tmp_path, **{place: {name: kind, "factor": 4.0, "rope_theta": 1e4}})
    with pytest.raises(ValueError, match=f"RoPE of type {kind}"):
        load_model(tmp_path)


def test_a_tied_file_may_keep_the_head_alone(tmp_path):
    hf = publish(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {HEAD: tensors.pop(EMBEDDING)}, path, {"format": "pt"})
    assert_same_model(tmp_path, hf)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="expected model.embed_tokens.weight of shape .* has none"):
        load_model(tmp_path)


def test_a_padded_vocabulary_is_read(tmp_path):
    """As in models that add a padding token to Llama 3's 128,256."""
    publish(tmp_path, hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=128257)
    assert_same_model(tmp_path, tmp_path)


def test_an_empty_config_is_llama_7b(tmp_path):
    publish(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    settings = read_config(open_folder(tmp_path))[0]
    assert settings["n_embd"] == 4096 and settings["n_kv_head"] == 32 and settings["rope_theta"] == 10000.0
    with pytest.raises(ValueError, match="expected model.embed_tokens.weight of shape"):
        load_model(tmp_path)
