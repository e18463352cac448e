"""Generation: against transformers, against rereading the whole context for each token, and the sampling.

pytest tests/test_generate.py        without a GPU the kernels run through Triton's interpreter
"""

import math

import pytest
import torch

import kernels
import kernels.reference
from runtime.checkpoint import load_model
from runtime.evaluate import log_likelihoods
from runtime.generate import decode_step, generate, new_caches, read_prompts, sample
from tests.published import MODEL_TYPE, publish
from tests.test_model import DEVICE, FP64, PLAIN, batch, build, error, needs_gpu


def prompts_of(*lengths):
    return [batch(1, n, seed=n)[0][0].tolist() for n in lengths]


def texts(model, prompts, n=12, seed=0, **settings):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    prompts = prompts.tolist() if isinstance(prompts, torch.Tensor) else prompts
    return torch.tensor(list(generate(model, prompts, n, generator=generator, **settings))).T.to(DEVICE)  # (B, n)


def read_alone(model, prompt, n):
    """One row's text, rereading the whole context for each token; past block_size without its older half."""
    block_size = model.config.block_size
    found = []
    context = prompt[-block_size:]
    for _ in range(n):
        if len(context) > block_size:  # block_size tokens and the newest: drop half of the former
            context = context[block_size - block_size // 2 :]
        found.append(model(torch.tensor([context], device=DEVICE))[0, -1].argmax().item())
        context = [*context, found[-1]]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The same tokens


@pytest.mark.parametrize("tied, kv_heads", [(True, 2), (False, 1)])
def test_greedy_tokens_are_those_of_transformers(tmp_path, tied, kv_heads):
    hf = publish(tmp_path, tie_word_embeddings=tied, num_key_value_heads=kv_heads).double()
    model = load_model(tmp_path, DEVICE).double()
    prompts = prompts_of(1, 40, 17)
    ours = texts(model, prompts, n=20, temperature=0).tolist()
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    for prompt, text in zip(prompts, ours, strict=True):
        expected = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
        assert text == expected[0, len(prompt) :].tolist()
    assert len(set(sum(ours, []))) > 10, "texts that repeat themselves show nothing"


@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 8, 1, 3, 8], [8, 20, 7]])  # equal ones, block_size, more
@pytest.mark.parametrize("block_size", [8, 7, 1])
def test_a_batch_is_each_row_read_alone(block_size, lengths):
    model = build(block_size=block_size, **PLAIN)
    prompts = prompts_of(*lengths)
    found = texts(model, prompts, n=30, temperature=0).tolist()
    assert found == [read_alone(model, prompt, 30) for prompt in prompts]
    assert MODEL_TYPE != "llama" or len(set(sum(found, []))) > 5, "texts that repeat themselves show nothing"


def test_rows_end_before_an_end_token_and_the_batch_ends_with_its_last_row():
    model = build(**PLAIN)
    prompts = prompts_of(4, 6)
    whole = list(generate(model, prompts, 30, temperature=0))
    eos = {whole[3][0], whole[9][1]}
    ended = list(generate(model, prompts, 30, temperature=0, eos=eos))
    ends = [next(i for i, tokens in enumerate(whole) if tokens[row] in eos) for row in (0, 1)]
    for row, end in enumerate(ends):
        text = [tokens[row] for tokens in whole[:end]]
        assert [tokens[row] for tokens in ended] == (text + [None] * 30)[: len(ended)]
    assert len(ended) == max(ends) + 1 < 30 and ends[0] != ends[1]


@pytest.mark.parametrize("settings", [PLAIN, {}, {"attention": "triton"}, {"checkpointing": "full"} | PLAIN])
@torch.no_grad()
def test_steps_behind_a_prompt_give_the_logits_of_the_whole_text(settings):
    model = build(**settings)
    tokens = batch(n_time=9)[0]
    caches = new_caches(model, len(tokens), 9)
    for _ in range(2):  # the second time in place of what the caches hold
        logits = [read_prompts(model, caches, tokens[:, :5].tolist())]
        logits += [decode_step(model, caches, tokens[:, i]) for i in range(5, 9)]
        assert error(torch.stack(logits, dim=1), model(tokens)[:, 4:]) < 1e-6  # they are rounded to float32


@needs_gpu
@pytest.mark.parametrize("lengths", [[5], [9, 3, 1]])
@torch.no_grad()
def test_a_cuda_graph_step_samples_what_an_eager_step_samples(lengths, monkeypatch):
    model = build(dtype=torch.bfloat16)
    prompts = prompts_of(*lengths)
    expected = []
    caches = new_caches(model, len(prompts), 40)
    tokens = sample(read_prompts(model, caches, prompts), 0)
    for _ in range(25):
        expected.append(tokens)
        tokens = sample(decode_step(model, caches, tokens), 0)
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    assert torch.equal(texts(model, prompts, n=25, temperature=0), torch.stack(expected, dim=1))
    assert len(set(replays)) == 1 and len(replays) == 23


DECODE = [  # heads, key/value heads, head size, positions, lengths
    (4, 2, 16, 40, [0, 39, 17]),
    (3, 1, 6, 5, [4]),
    (8, 8, 20, 33, [32, 1]),
    (6, 2, 128, 300, [299]),  # long enough to be split
    (2, 1, 64, 700, [150, 699]),
]


@pytest.mark.parametrize("dtype, tolerance", [(FP64, 1e-14), (torch.float32, 5e-7), (torch.float16, 1e-3)])
@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_decode_attention_is_attention_and_fills_the_cache(shape, dtype, tolerance):
    n_head, n_kv_head, head_dim, n_positions, lengths = shape
    draw = lambda *size: torch.randn(len(lengths), *size, device=DEVICE, dtype=FP64).to(dtype)  # noqa: E731
    q = draw(1, n_head, head_dim)
    k = draw(1, n_kv_head, head_dim)
    v = draw(1, n_kv_head, head_dim)
    caches = [draw(n_positions, n_kv_head, head_dim) for _ in "kv"]
    lengths = torch.tensor(lengths, device=DEVICE)
    for row, length in enumerate(lengths):
        caches[0][row, length:] = caches[1][row, length:] = math.nan  # positions that were never written
    ours = [cache.clone() for cache in caches]
    theirs = [cache.nan_to_num().double() for cache in caches]
    y = kernels.decode_attention(q, k, v, *ours, lengths)
    expected = kernels.reference.decode_attention(q.double(), k.double(), v.double(), *theirs, lengths)
    assert error(y, expected) < tolerance and y.dtype == dtype
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.nan_to_num().double(), other)


def test_decode_attention_writes_nothing_past_a_full_cache():
    q, k, v = (torch.randn(2, 1, 1, 16, device=DEVICE) for _ in "qkv")
    caches = [torch.randn(2, 8, 1, 16, device=DEVICE) for _ in "kv"]
    longer = [torch.cat([cache, cache[:, :1]], dim=1).double() for cache in caches]
    lengths = torch.tensor([8, 3], device=DEVICE)  # behind the first row lies the second
    y = kernels.decode_attention(q, k, v, *caches, lengths)
    expected = kernels.reference.decode_attention(q.double(), k.double(), v.double(), *longer, lengths)
    assert error(y, expected) < 5e-7
    for cache, other in zip(caches, longer, strict=True):
        assert torch.equal(cache.double(), other[:, :8])


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def test_one_token_left_is_greedy_and_a_seed_repeats_its_text():
    model = build(**PLAIN)
    prompt = batch(n_batch=3)[0]
    greedy = texts(model, prompt, temperature=0)
    for settings in ({"top_k": 1}, {"top_p": 1e-320}, {"temperature": 1e-40}, {"min_p": 1.0}):
        assert torch.equal(texts(model, prompt, **settings), greedy), settings
    first = texts(model, prompt, seed=1)
    assert torch.equal(first, texts(model, prompt, seed=1, top_k=10**6, top_p=1.0, min_p=0.0))
    assert not torch.equal(first, texts(model, prompt, seed=2)) and not torch.equal(first, greedy)


def test_tokens_are_sampled_from_their_probabilities():
    logits = torch.tensor([1.0, 3.0, -2.0, 2.0, 0.0], device=DEVICE)
    cases = [  # temperature, top_k, top_p, min_p, tokens kept; their probabilities are 0.64, 0.24, 0.09, 0.03, 0.00
        ((1.0, None, None, None), [0, 1, 2, 3, 4]),
        ((2.0, 2, None, None), [1, 3]),
        ((1.0, None, 0.7, None), [1, 3]),  # the second carries the sum past 0.7
        ((1.0, 2, 0.72, None), [1]),  # of the two the first has 0.73
        ((2.0, None, None, 0.1), [0, 1, 3, 4]),
        ((1.0, 2, None, 0.01), [1, 3]),
    ]
    halves = torch.zeros(1000, 2, device=DEVICE)
    assert sample(halves, top_p=0.5).unique().numel() == 1, "the first alone reaches 0.5"
    for settings, kept in cases:
        generator = torch.Generator(DEVICE).manual_seed(0)
        drawn = sample(logits.expand(20000, -1), *settings, generator)
        shares = torch.bincount(drawn, minlength=5) / 20000
        only = torch.full_like(logits, -math.inf)
        only[kept] = logits[kept] / settings[0]
        worst = (shares - only.softmax(0)).abs().max().item()
        assert worst < 0.015 and (shares[only.isinf()] == 0).all(), f"{settings}: {shares.tolist()}"


def test_invalid_sampling_settings_and_an_empty_prompt_are_refused():
    model = build(n_layer=1, **PLAIN)
    nan = math.nan
    for name, value in (("temperature", -1.0), ("temperature", nan), ("top_k", 0), ("top_p", 0.0), ("min_p", 1.1)):
        with pytest.raises(ValueError, match=f"{name} .*: must be"):
            next(generate(model, [[1]], 2, **{name: value}))
    with pytest.raises(ValueError, match="at least one token to continue"):
        next(generate(model, [[1], []], 2))
    n = model.config.vocab_size
    with pytest.raises(ValueError, match=f"the tokenizer gives token {n}, but the model has {n:,} tokens"):
        next(log_likelihoods(model, [([n, 1], [0, 1])], 1))
