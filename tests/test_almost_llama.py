"""Published folders that are not quite like Llama 3's: read as transformers reads them, or refused with an error."""

import pytest
from safetensors.torch import load_file, save_file

from runtime.checkpoint import load_model
from tests.published import SCALING, assert_same_model, edit_config, publish

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.mark.parametrize("missing", [
    "num_key_value_heads", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "head_dim", "attention_bias",
    "max_position_embeddings", "mlp_bias",
])  # fmt: skip
def test_missing_config_fields_default_as_in_transformers(tmp_path, missing):
    publish(tmp_path, num_key_value_heads=4, tie_word_embeddings=False, rope_scaling=None)
    edit_config(tmp_path, **{missing: None})
    assert_same_model(tmp_path, tmp_path)


LLAMA3 = {"rope_type": "llama3", **SCALING}
NEW = [None, {}, {"rope_type": "default", "rope_theta": 777.0}, {"rope_theta": 777.0, **LLAMA3}]
OLD = [None, {}, {"type": "default"}, {"type": "llama3", **SCALING, "factor": 2.0}, {"rope_theta": 55.0, **LLAMA3}]


@pytest.mark.parametrize("theta", [None, 500.0])
@pytest.mark.parametrize("new", NEW, ids=str)
def test_rope_in_two_places_is_read_as_in_transformers(tmp_path, new, theta):
    publish(tmp_path)
    for old in OLD:
        edit_config(tmp_path, rope_parameters=new, rope_scaling=old, rope_theta=theta)
        assert_same_model(tmp_path, tmp_path)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["linear", "yarn", None])
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


def test_a_head_of_its_own_that_config_json_ties_is_refused_and_a_copy_of_the_embedding_is_not(tmp_path):
    """As older versions of peft leave a head that they trained by itself. transformers 5 reads both, 4 one of them."""
    hf = publish(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, path, {"format": "pt"})
    assert_same_model(tmp_path, hf)
    save_file(tensors | {HEAD: tensors[EMBEDDING].flip(0)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="lm_head.weight that is not its .*: set tie_word_embeddings to false"):
        load_model(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    assert_same_model(tmp_path, tmp_path)
