"""Settings that cannot work together, and a user's mistakes, get a sentence."""

import pytest

from configurator import SettingError, preview
from runtime.check_settings import find_problem
from tests.runs import ROOT, SMALL, error_of, flags

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

CASES = [  # flags; what the sentence names, None if they are accepted; the ranks
    ("--batch_size=0", "batch_size is 0: it must be at least 1"),
    ("--warmup_iters=-1", "warmup_iters is -1: it must be at least 0"),
    ("--min_lr=1e-2 --learning_rate=1e-3", "min_lr"),
    ("--lr_schedule=wsd --warmup_iters=4 --cooldown_iters=5 --max_iters=8", "max_iters"),
    ("--cooldown_iters=5", "--lr_schedule=wsd"),
    ("--lr_schedule=wsd --lr_decay_iters=8", "cooldown_iters"),
    ("--optimizer=muon --offload=optimizer", "offload=none"),
    ("--optimizer=galore --galore_rank=33", "galore_rank"),
    ("--optimizer=galore --galore_rank=8 --cuda_graph=true", "cuda_graph=false"),
    ("--optimizer=galore --galore_rank=8 --dtype=float16", "galore"),
    ("--optimizer=soapmuon --cuda_graph=true", "cuda_graph=false"),
    ("--optimizer=soapmuon --dtype=float16", "soapmuon"),
    ("--offload_activations=true --compile=true", "--compile=false"),
    ("--offload_dir=states", "--offload=optimizer"),
    ("--mask_documents=true --attention=sdpa", "mask_documents"),
    ("--mask_documents=true", "heads of size"),
    ("--optimizer_bits=8", "256"),
    ("--lora_alpha=-1", "lora_alpha"),
    ("--quantize_base=nf4", "--lora_rank=16"),
    ("--lora_rank=4 --optimizer=muon", "lora_rank"),
    ("--lora_rank=4 --quantize_base=nf4 --offload=all", "--offload=optimizer"),
    ("--cuda_graph=true --offload=all", "--cuda_graph=false"),
    ("--epochs=0", "epochs is 0: it must be at least 1"),
    ("--sample_prompt=a --compile=true", "sample_prompt"),
    ("--sample_prompt=a --fp8=true", "sample_prompt"),
    ("--sample_prompt=a --gradient_accumulation_steps=2", "sample.py", 2),
    ("--sample_prompt=a --gradient_accumulation_steps=2", None),
    ("--gradient_accumulation_steps=5", "--gradient_accumulation_steps=4", 4),
    ("--gradient_accumulation_steps=5", None, 5),
]


@pytest.mark.parametrize("words, named, ranks", [(*case, 1)[:3] for case in CASES])
def test_settings_that_cannot_work_together_get_a_sentence_that_names_what_to_change(words, named, ranks):
    problem = find_problem(preview(ROOT / "train.py", [*flags(SMALL), *words.split()]), ranks)
    assert named in problem if named else problem is None


@pytest.mark.parametrize("config, words, epochs", [
    ("epochs = 3", "", 3),
    ("epochs = 3", "--epochs=2", 2),
    ("epochs = 3", "--max_iters=500", None),
    ("max_iters = 500", "--epochs=3", 3),
    ("max_iters = 500", "", None),
    ("epochs = None\nmax_iters = 500", "", None),
    ("", "--max_iters=500 --epochs=none", None),
])  # fmt: skip
def test_of_max_iters_and_epochs_the_one_that_is_named_later_counts(tmp_path, config, words, epochs):
    (tmp_path / "mine.py").write_text(config)
    assert preview(ROOT / "train.py", [str(tmp_path / "mine.py"), *words.split()])["epochs"] == epochs


@pytest.mark.parametrize("config, words", [("", "--epochs=3 --max_iters=500"), ("epochs = 3\nmax_iters = 500", "")])
def test_max_iters_and_epochs_in_one_place_get_a_sentence(tmp_path, config, words):
    (tmp_path / "mine.py").write_text(config)
    with pytest.raises(SettingError, match="max_iters and epochs exclude each other"):
        preview(ROOT / "train.py", [str(tmp_path / "mine.py"), *words.split()])


@pytest.mark.parametrize("config", sorted((ROOT / "config").glob("*.py")), ids=lambda path: path.stem)
def test_every_config_of_ours_can_run(config):
    settings = preview(ROOT / "train.py", [str(config)])
    settings |= {"vocab_size": 257, "cuda_graph": False}  # the dataset gives the vocabulary, a GPU the graph
    if settings["n_embd"] <= 4096:
        assert find_problem(settings, world_size=1) is None


MISTAKES = [
    (dict(dataset="no_such_data"), "no_such_data"),
    (dict(device="cuda"), "torch finds no CUDA device"),
    (dict(n_head=3), "n_head"),
    (dict(init_from="resume"), "holds no checkpoint"),
    (dict(eval_only=True), "has no checkpoint to evaluate: name weights"),
    (dict(lora_rank=4), "lora_rank has no weights to adapt"),
    (dict(init_from="resum"), "init_from is auto, scratch, resume or a folder of weights: there is no resum"),
]


@pytest.mark.parametrize("settings, expected", MISTAKES, ids=str)
def test_a_users_mistake_gets_a_sentence(train, capsys, settings, expected):
    if settings.get("device") == "cuda" and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    assert expected in error_of(train, capsys, **settings)


def test_a_config_without_its_dataset_names_the_command_that_makes_it(train, capsys):
    if (ROOT / "data/fineweb_edu/meta.json").exists():
        pytest.skip("the dataset is here")
    message = error_of(train, capsys, str(ROOT / "config/llama32_1b.py"), dataset="fineweb_edu", device="cpu")
    assert "python data/fineweb_edu/prepare.py" in message
