"""The trainers that nanocria is measured against, each written as its authors would and at its best.

measure() trains one of them for some steps on the text that nanocria is measured on. Under torchrun, recipe and
torchtitan are sharded over the ranks. PyTorch's allocator uses expandable segments, as in train.py.

recipe        What torchtitan 0.2 does with a Llama 3, written out in plain PyTorch: blocks compiled one by one, FSDP2
              with fp32 masters and bf16 compute, a compiled loss over whole logits, fused AdamW. It has three
              advantages over the original: the head is tied to the embedding (262 million fewer parameters), RoPE is
              real-valued (inductor cannot fuse torchtitan's complex product), and selective checkpointing keeps
              cuDNN's attention (torchtitan keeps flash's and recomputes cuDNN's).
recipe-fp8    The same with torchao's float8 in the blocks, rowwise scales and weight gradients in bfloat16, as ours:
              the faster of torchao's rowwise recipes for this model.
recipe-zero2  The same, but the blocks' weights stay gathered from forward to backward.
torchtitan    The package itself: its model, checkpointing, compilation and sharding. It cannot tie the embedding.
hf            transformers' LlamaForCausalLM in pure bf16: weights, gradients and optimizer states.
hf-compiled   The same under torch.compile, with causal attention without a mask, as transformers does uncompiled.
              hf-graphs: with mode="reduce-overhead", which replays CUDA graphs.
hf-liger      The same with Liger-Kernel's patches, including its fused linear cross-entropy.
hf-liger-lora hf-liger, frozen in bfloat16, with peft's adapters of rank 16 on its seven projections, in float32 under
              autocast, peft's default; hf-liger-qlora: frozen in bitsandbytes' NF4 with double quantisation instead.
hf-liger-8bit hf-liger with bitsandbytes' 8-bit AdamW; hf-liger-galore with galore-torch's 8-bit GaLore, of rank 128
              and otherwise its own defaults, on the blocks' matrices.
hf-masters    hf with float32 weights, gradients and optimizer states and bf16 compute, through FSDP2; hf-offload keeps
              them in CPU memory, where AdamW runs too. hf-liger-masters and hf-liger-offload likewise.
"""

import functools
import gc
import itertools
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.record import ROOT
from configurator import preview
from data.loader import open_dataset
from data.write import cpu_cores
from model import Llama, LlamaConfig, rope_tables
from runtime import memory_stats
from runtime.device import send_to_cpu
from runtime.hf_config import write_config
from runtime.run_log import peak_flops

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
SEED, LEARNING_RATE = 1337, 1e-4


def llama_config(path: str, **changes) -> LlamaConfig:
    """The model that a config file of train.py describes, with pystdlib's vocabulary if the file does not set one."""
    settings = preview(ROOT / "train.py", [str(ROOT / path)]) | changes
    settings["vocab_size"] = settings["vocab_size"] or 257
    return LlamaConfig(**{name: settings[name] for name in LlamaConfig.__dataclass_fields__})


# --- torchtitan's recipe: the model. The weights have torchtitan's names, which are Meta's. ---


class PlainAttention(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.head_dim, self.n_rep = c.head_dim, c.n_head // c.n_kv_head
        self.wq, self.wo = (nn.Linear(c.n_embd, c.n_embd, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=False) for _ in range(2))

    def forward(self, x, cos, sin):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))  # (B, T, heads, D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # K and V repeated for each query head, as in torchtitan: (B, T, H, D)
        k, v = (x.repeat_interleave(self.n_rep, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel(backends, set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotate(x, cos, sin):
    """RoPE of x (B, T, heads, D) by halves, in fp32; cos and sin (T, D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class PlainMLP(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(c.n_embd, c.ffn_dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.ffn_dim, c.n_embd, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PlainBlock(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(c.n_embd, c.norm_eps), nn.RMSNorm(c.n_embd, c.norm_eps)
        self.attention, self.feed_forward = PlainAttention(c), PlainMLP(c)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class PlainLlama(nn.Module):
    """Llama 3 as commonly written without custom kernels: tokens (B, T) to logits (B, T, V)."""

    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.config = c
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.n_embd)
        self.layers = nn.ModuleList(PlainBlock(c) for _ in range(c.n_layer))
        self.norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        self.output = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.tie()

    def tie(self):
        if self.config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def materialize(self, device):
        """Move from the meta device to this one: random weights, and RoPE's tables."""
        self.to_empty(device=device)
        self.tie()  # to_empty gave the head a separate weight
        fill(self, device)
        self.cos, self.sin = rope_tables(self.config, 0, self.config.block_size, device)
        return self

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)  # (B, T, C)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


@torch.no_grad()
def fill(model: nn.Module, device) -> None:
    """Random weights, drawn on the device, each rank for its own part; norms 1."""
    for parameter in model.parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part.fill_(1.0) if parameter.ndim == 1 else part.copy_(0.02 * torch.randn(part.shape, device=device))


def whole_loss(logits, targets):
    """The mean cross-entropy of whole logits (B, T, V). Compiled, it never writes their fp32 copy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# --- torchtitan's recipe: checkpointing, compilation, sharding ---

ATEN = torch.ops.aten
KEPT_OPS = {ATEN.mm.default, *(getattr(ATEN, f"_scaled_dot_product_{name}").default
                               for name in ("cudnn_attention", "flash_attention", "efficient_attention",
                                            "flash_attention_for_cpu"))}  # fmt: skip


def every_second_matmul():
    """torchtitan's 'op' policy: keep attention and the first, third, fifth, ... matmul of a block."""
    n_matmuls = Counter()  # forward and recomputation count separately

    def policy(ctx, op, *args, **kwargs):
        n_matmuls[ctx.is_recompute] += op == ATEN.mm.default
        every_second = op == ATEN.mm.default and n_matmuls[ctx.is_recompute] % 2 == 0
        keep = op in KEPT_OPS and not every_second
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpointed(block: nn.Module, checkpointing: str) -> nn.Module:
    if checkpointing == "none":
        return block
    options = {"context_fn": every_second_matmul} if checkpointing == "selective" else {}
    return checkpoint_wrapper(block, preserve_rng_state=False, **options)


def mesh_of_all_ranks(device: torch.device):
    store = {"store": dist.HashStore()} if RANKS == 1 else {}  # else torchrun's
    # gloo beside NCCL: the norm of offloaded gradients is summed on the CPU
    backend, bound = ("cpu:gloo,cuda:nccl", {"device_id": device}) if device.type == "cuda" else ("gloo", {})
    dist.init_process_group(backend, rank=RANK, world_size=RANKS, **store, **bound)
    return init_device_mesh(device.type, (RANKS,))


def fsdp_options(device: torch.device) -> dict:
    # cast_forward_inputs would round cos and sin; the residual stream is bf16 from the embedding on
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return {"mesh": mesh_of_all_ranks(device), "mp_policy": policy}


def build_recipe(c: LlamaConfig, checkpointing: str, device: torch.device, reshard=True, fp8: str | None = None):
    with torch.device("meta"):
        model = PlainLlama(c)
    if fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe, in_blocks = Float8LinearConfig.from_recipe_name(fp8), lambda _, name: name != "output"
        convert_to_float8_training(model, config=recipe, module_filter_fn=in_blocks)
    options = fsdp_options(device)
    for i, block in enumerate(model.layers):
        # compile the block inside FSDP: the compiler cannot trace FSDP's hooks, so they stay outside the graph
        model.layers[i] = torch.compile(checkpointed(block, checkpointing), fullgraph=True)
        fully_shard(model.layers[i], reshard_after_forward=reshard, **options)
    if not c.tie_embeddings:  # torchtitan's groups; a tied weight belongs to both ends, so to the root
        fully_shard(model.tok_embeddings, reshard_after_forward=reshard, **options)
        fully_shard([model.norm, model.output], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    model.materialize(device)
    loss = torch.compile(whole_loss)
    return model, lambda tokens, targets: loss(model(tokens), targets)


# --- The others ---


def build_torchtitan(c: LlamaConfig, checkpointing: str, device: torch.device):
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config.job_config import ActivationCheckpoint, Compile
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    scaling = c.rope_scaling or {"factor": 1.0}
    scaling = {"scaling_factor" if key == "factor" else key: value for key, value in scaling.items()}
    multiplier = (c.ffn_dim + 0.5) / int(8 * c.n_embd / 3)  # of its default width; it rounds the product down
    args = TransformerModelArgs(
        dim=c.n_embd, n_layers=c.n_layer, n_heads=c.n_head, n_kv_heads=c.n_kv_head, vocab_size=c.vocab_size,
        ffn_dim_multiplier=multiplier, multiple_of=1, norm_eps=c.norm_eps, rope_theta=c.rope_theta,
        rope_scaling_args=RoPEScalingArgs(**scaling), max_seq_len=c.block_size,
    )  # fmt: skip
    with torch.device("meta"):
        model = Transformer(args)
    # on one rank parallelize_llama uses autocast instead of FSDP; so call its parts here, in the same order
    if checkpointing != "none":
        checkpoint = ActivationCheckpoint(mode=checkpointing, selective_ac_option="op")
        kept_ops = parallelize._op_sac_save_list
        parallelize.apply_ac(model, checkpoint, model_compile_enabled=True, op_sac_save_list=kept_ops)
    parallelize.apply_compile(model, Compile(enable=True))
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    parallelize.apply_fsdp(model, mesh_of_all_ranks(device), pp_enabled=False, **dtypes)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    loss = torch.compile(cross_entropy_loss)
    return model, lambda tokens, targets: loss(model(tokens), targets)


def build_hf(c: LlamaConfig, checkpointing: str, device, compile_mode="", liger=False, dtype=torch.bfloat16):
    import transformers

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    hf_config = transformers.LlamaConfig(**write_config(c, "bytes", "bfloat16", {}, {}), use_cache=False)
    with torch.device(device):  # from_config, unlike .to(dtype), leaves RoPE's frequencies in fp32
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        model = transformers.AutoModelForCausalLM.from_config(hf_config, **options).train()
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compile_mode:
        from transformers.models.llama import modeling_llama

        modeling_llama.create_causal_mask = lambda *args, **kwargs: None  # compiled, it would build a (T, T) mask
    run = torch.compile(model, mode=compile_mode) if compile_mode else model
    # shift_labels: the targets are shifted already
    return model, lambda tokens, targets: run(input_ids=tokens, labels=targets, shift_labels=targets).loss


def build_hf_masters(c: LlamaConfig, checkpointing: str, device: torch.device, liger=False, offload=False):
    """float32 weights, which FSDP2 casts to bf16 for forward and backward, block by block."""
    model, loss_of = build_hf(c, checkpointing, "meta", liger=liger, dtype=torch.float32)
    options = fsdp_options(device)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)  # embedding and head: one parameter if tied
    model.to_empty(device="cpu" if offload else device)
    if c.tie_embeddings:  # to_empty gave the head a separate weight
        model.lm_head.weight = model.model.embed_tokens.weight
    fill(model, device)
    torch.cuda.empty_cache()  # of the random draws
    with torch.device(device):  # its frequencies are not parameters
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if offload:
        torch.set_num_threads(max(1, cpu_cores() // RANKS))  # AdamW's
    return model, loss_of


def build_hf_lora(c: LlamaConfig, checkpointing: str, device: torch.device, nf4=False):
    model, _ = build_hf(c, checkpointing, device, liger=True)
    if nf4:
        quantize_as_bitsandbytes(model.model.layers, device)
    model = with_peft(model)
    for module in model.modules():  # no float32 copies of the inputs: autocast rounds them anyway, so copies would only
        module.cast_input_dtype_enabled = False  # cost time and memory; peft's 4-bit layers skip them under autocast

    def loss_of(tokens, targets):
        with torch.autocast(device.type, torch.bfloat16):
            return model(input_ids=tokens, labels=targets, shift_labels=targets).loss

    return model, loss_of


def with_peft(model: nn.Module) -> nn.Module:
    import peft

    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters)


def quantize_as_bitsandbytes(layers: nn.Module, device: torch.device) -> None:
    import bitsandbytes

    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                packed = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16, device="meta"
                )
                packed.weight = bitsandbytes.nn.Params4bit(
                    child.weight.detach().cpu(),  # quantised on its way to the GPU
                    requires_grad=False, quant_type="nf4", compress_statistics=True,
                )  # fmt: skip
                setattr(module, name, packed.to(device))


BUILDERS = {
    "recipe": build_recipe,
    "recipe-fp8": functools.partial(build_recipe, fp8="rowwise_with_gw_hp"),
    "recipe-zero2": functools.partial(build_recipe, reshard=False),
    "torchtitan": build_torchtitan,
    "hf": build_hf,
    "hf-compiled": functools.partial(build_hf, compile_mode="default"),
    "hf-graphs": functools.partial(build_hf, compile_mode="reduce-overhead"),
    **dict.fromkeys(("hf-liger", "hf-liger-8bit", "hf-liger-galore"), functools.partial(build_hf, liger=True)),
    "hf-liger-lora": build_hf_lora,
    "hf-liger-qlora": functools.partial(build_hf_lora, nf4=True),
    "hf-masters": build_hf_masters,
    "hf-liger-masters": functools.partial(build_hf_masters, liger=True),
    "hf-offload": functools.partial(build_hf_masters, offload=True),
    "hf-liger-offload": functools.partial(build_hf_masters, liger=True, offload=True),
}


def make_optimizer(arm: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if arm == "hf-liger-8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(trained, **options)
    if arm == "hf-liger-galore":
        from galore_torch import GaLoreAdamW8bit

        how = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
        blocks = set(model.model.layers.parameters())
        groups = [{"params": [p for p in trained if p not in blocks or p.ndim != 2]},
                  {"params": [p for p in trained if p in blocks and p.ndim == 2], **how}]  # fmt: skip
        return GaLoreAdamW8bit(groups, **options)
    return torch.optim.AdamW(trained, fused=True, **options)


# --- The step, and its measurement ---


def train_step(model: nn.Module, loss_of, optimizer, tokens, targets) -> Callable[[], list[float]]:
    """Launch forward, backward, clip and update; return a function that waits for the loss and the gradient norm."""
    loss = loss_of(tokens, targets)
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=True)
    optimizer.step()
    del grads
    optimizer.zero_grad()
    # an offloaded model's norm is on the CPU
    return send_to_cpu(torch.stack([loss.detach().float(), norm.float().to(loss.device)]))


def batches(n_batches: int, batch: int, block: int, device) -> torch.Tensor:
    """This rank's tokens (n_batches, B, T + 1) of pystdlib: the same as train.py reads.

    A matmul's speed depends on its numbers, and random tokens would give other gradients of the logits.
    """
    text, _ = open_dataset("pystdlib", block, SEED)
    tokens = text.sequences(0, n_batches * RANKS * batch).unflatten(0, (n_batches, RANKS, batch))
    return tokens[:, RANK].to(device)


def over_ranks(values: list[float], op, device) -> list[float]:
    values = torch.tensor(values, device=device)
    if RANKS > 1:
        dist.all_reduce(values, op)
    return values.tolist()


def mfu(config: LlamaConfig, tok_per_s: float, frozen: bool) -> float | None:
    """MFU of one GPU, by train.py's count of FLOPs; None if the card's peak is unknown. frozen: under adapters."""
    peak = peak_flops(torch.cuda.get_device_name())
    with torch.device("meta"):
        model = Llama(config).requires_grad_(not frozen)
    return model.flops_per_token(config.block_size) * tok_per_s / peak if peak else None


def own_device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def measure(arm: str, config: str, batch: int, block: int, checkpointing="none", steps=20, warmup=5, **changes) -> dict:
    """Train an arm for warmup + steps: the median step, the peak memory of the rank that needs most, and tokens per
    second and losses over all ranks. batch: per rank. warmup 5: any later step is as fast as the fifth."""
    device = own_device()
    torch.cuda.set_device(device)
    memory_stats.let_segments_grow()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(SEED)
    c = llama_config(config, block_size=block, **changes)
    model, loss_of = BUILDERS[arm](c, checkpointing, device)
    optimizer = make_optimizer(arm, model)
    losses, ends, unread = [], [], deque()
    data = batches(warmup + steps, batch, block, device)
    data[-1] = data[0]  # the same tokens in the first and the last step, so that their losses are comparable
    for step, blocks in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 10)  # without a warm-up 8B's loss first rises
        if step == warmup:
            gc.collect()
            gc.disable()  # as in torchtitan: no collection in the middle of a step
            torch.cuda.reset_peak_memory_stats()
            ends = [time.perf_counter()]
        unread.append(train_step(model, loss_of, optimizer, blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()))
        # As in train.py: read the loss after launching the next step, so that the GPU never waits.
        while len(unread) > (step + 1 not in (warmup, len(data))):
            losses.append(unread.popleft()()[0])
            ends.append(time.perf_counter())
    seconds = statistics.median(end - began for began, end in itertools.pairwise(ends))
    tok_per_s = RANKS * batch * block / seconds
    first, last = over_ranks([losses[0] / RANKS, losses[-1] / RANKS], dist.ReduceOp.SUM, device)
    if not last < first:  # or NaN
        return {"failed": f"it does not train: its loss went from {first} to {last}"}
    peaks = [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
    peak_gib, reserved_gib = over_ranks(peaks, dist.ReduceOp.MAX, device)
    point = {"ms_per_step": seconds * 1000, "tok_per_s": tok_per_s, "peak_gib": peak_gib, "reserved_gib": reserved_gib}
    return point | {"mfu": mfu(c, tok_per_s / RANKS, "lora" in arm), "first_loss": first, "last_loss": last}
