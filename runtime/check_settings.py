"""Check settings before anything is allocated: each one's limits, and train.py's combinations that do not work."""

from collections.abc import Mapping
from types import SimpleNamespace

from kernels.flash_attention import HEAD_SIZES
from optimizers import rule_of
from runtime.distributed import print0, stop

AT_LEAST = {  # train.py's, sample.py's and bench.py estimate's
    2: ("window",),
    1: ("batch_size", "block_size", "gradient_accumulation_steps", "max_iters", "epochs", "lr_decay_iters",
        "eval_interval", "eval_iters", "log_interval", "timeout", "galore_rank", "n_layer", "n_head", "n_kv_head",
        "n_embd", "ffn_dim", "vocab_size", "num_samples", "top_k", "ranks"),
    0: ("warmup_iters", "cooldown_iters", "learning_rate", "min_lr", "weight_decay", "grad_clip", "keep_last", "seed",
        "lora_rank", "lora_alpha", "max_new_tokens", "temperature"),
}  # fmt: skip


def check_settings(settings: Mapping, world_size: int) -> None:
    problem = find_problem(settings, world_size)
    if problem:
        stop(problem)


def check_schedule(settings: Mapping) -> None:
    """For a run of epochs, whose max_iters is known once the data is open."""
    problem = schedule_problem(SimpleNamespace(**settings))
    if problem:
        stop(problem)
    steps = settings["max_iters"]
    warmup = settings["warmup_iters"]
    if steps <= 2 * warmup:
        few = f"only {steps} steps, {min(steps, warmup)} of them warm-up: the weights hardly change"
        print0(f"schedule  {few}. More --epochs, a smaller --block_size, or --warmup_iters=0")


def find_problem(settings: Mapping, world_size: int) -> str | None:
    """Return a sentence that says why train.py cannot run these settings on world_size ranks; None if it can."""
    s = SimpleNamespace(**settings)
    schedule = None if s.epochs else schedule_problem(s)
    return (
        limit_problem(settings) or schedule or optimizer_problem(s) or lora_problem(s) or system_problem(s, world_size)
    )


def limit_problem(settings: Mapping) -> str | None:
    """Return a sentence about a number that is too small, or None."""
    for least, names in AT_LEAST.items():
        for name in names:
            value = settings.get(name)
            if value is not None and value < least:
                return f"{name} is {value}: it must be at least {least}"
    return None


def schedule_problem(s: SimpleNamespace) -> str | None:
    if s.min_lr is not None and s.min_lr > s.learning_rate:
        return f"min_lr ({s.min_lr}) must be at most learning_rate ({s.learning_rate})"
    if s.lr_schedule != "wsd" and s.cooldown_iters > 0:
        return f"cooldown_iters ({s.cooldown_iters}) is for lr_schedule wsd: add --lr_schedule=wsd"
    if s.lr_schedule == "wsd" and s.lr_decay_iters is not None:
        return f"lr_decay_iters ({s.lr_decay_iters}) is for cosine and linear: wsd's decay has cooldown_iters steps"
    if s.lr_schedule == "wsd" and s.warmup_iters + s.cooldown_iters > s.max_iters:
        steps = f"warmup_iters ({s.warmup_iters}) and cooldown_iters ({s.cooldown_iters})"
        return f"{steps} together must be at most max_iters ({s.max_iters})"
    return None


def optimizer_problem(s: SimpleNamespace) -> str | None:
    if s.offload != "none" and not rule_of(vars(s)).supports_offload:
        return f"optimizer={s.optimizer} works with offload=none: it has no update on the CPU"
    if s.optimizer_bits == 8 and (s.n_embd % 256 or s.ffn_dim % 256):
        return "optimizer_bits=8 quantizes groups of 256 weights: n_embd and ffn_dim must be multiples of 256"
    smallest = min(s.n_embd, s.ffn_dim, s.n_kv_head * s.n_embd // s.n_head)  # side of a matrix in a block
    if s.optimizer == "galore" and s.galore_rank > smallest:
        return f"galore_rank ({s.galore_rank}) must be at most {smallest}, the smallest side of a matrix"
    if s.optimizer in ("galore", "soapmuon") and s.cuda_graph:
        return f"optimizer={s.optimizer} needs the CPU when it renews its bases: add --cuda_graph=false"
    if s.optimizer in ("galore", "soapmuon") and s.dtype == "float16":
        return f"optimizer={s.optimizer} works with dtype bfloat16 or float32: an overflow would leave no basis"
    return None


def lora_problem(s: SimpleNamespace) -> str | None:
    if not s.lora_rank:
        if s.quantize_base != "none":
            return f"quantize_base={s.quantize_base} is for the frozen weights under adapters: add --lora_rank=16"
        return None
    if s.optimizer != "adamw" or s.optimizer_bits != 32:
        return "lora_rank works with optimizer=adamw and optimizer_bits=32: adapters have few states"
    if s.offload == "all" and (s.fp8 or s.quantize_base == "nf4"):
        return "frozen weights in 4 or 8 bits stay on the GPU: add --offload=optimizer or --offload=none"
    return None


def system_problem(s: SimpleNamespace, world_size: int) -> str | None:
    micro_batches = s.gradient_accumulation_steps
    if micro_batches % world_size:
        multiple = max(micro_batches // world_size, 1) * world_size
        return (
            f"gradient_accumulation_steps ({micro_batches}) must be a multiple of the {world_size} ranks, as in "
            f"--gradient_accumulation_steps={multiple}"
        )
    if s.offload_activations and (s.compile or s.cuda_graph):
        return "offload_activations works without compile and cuda_graph: add --compile=false --cuda_graph=false"
    if s.offload_dir is not None and s.offload == "none":
        return f"offload_dir ({s.offload_dir}) needs --offload=optimizer or --offload=all: nothing is offloaded"
    if s.cuda_graph and (world_size > 1 or s.offload != "none"):
        return "cuda_graph needs one GPU and offload=none: add --cuda_graph=false"
    if s.mask_documents and s.attention == "sdpa":
        return "mask_documents works with attention auto or triton: PyTorch's does not support it"
    if s.sample_prompt is not None and (world_size > 1 or s.compile or s.fp8):
        return "sample_prompt works in one process without compile and fp8: sample.py reads each checkpoint, instead"
    head_dim = s.n_embd / s.n_head
    if s.mask_documents and head_dim not in HEAD_SIZES:
        return f"mask_documents works with heads of size 16, 32, 64 or 128, not {head_dim:g}"
    return None
