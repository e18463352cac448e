"""The peers that nanocria is compared with, each written as its authors would and at its best.

To compare with another trainer, write one function here, which takes (config, checkpointing, device) and returns its
model, a function from tokens and targets (B, T) to the loss, and its optimizer, and add it to PEERS at the end:

    python bench.py step --trainers=nanocria,mine

Their packages, for all of the table:

    pip install "transformers>=5.17,<6" liger-kernel==0.8.5 "peft>=0.21,<0.22" "bitsandbytes>=0.50,<0.51" \\
        galore-torch==1.0 "torchtitan<0.3" "torchao>=0.17,<0.18" unsloth==2026.10.9

The trainer torchtitan-0.3 needs PyTorch 2.14 and another release of one package, in a folder that PYTHONPATH names for
it alone:

    pip install --target=titan "torchtitan==0.3.0" "flash-attn-4[cu13]==4.0.0b36"
    PYTHONPATH=titan:titan/nvidia_cutlass_dsl/dsl_packages python bench.py step --trainers=torchtitan-0.3

Under torchrun, recipe and torchtitan are sharded over the ranks.
"""

import contextlib
import functools
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import plain_llama
from benchmarks.settings import ROOT
from data.encode import cpu_cores
from model import LlamaConfig
from runtime.distributed import local, rank, world_size
from runtime.hf import write_config

LEARNING_RATE = 1e-4
ADAMW = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1}
NO_SELECTIVE = "Hugging Face has no selective checkpointing"
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
CUDNN_ATTENTION = partial(sdpa_kernel, CUDNN_FIRST, set_priority=True)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained_parameters(model), fused=True, **ADAMW)


@torch.no_grad()
def randomize(model: nn.Module, device) -> None:
    """Random weights, drawn on the device, each rank for its own part; norms 1."""
    for parameter in model.parameters():
        part = local(parameter)
        if parameter.ndim == 1:
            part.fill_(1.0)
        else:
            part.copy_(0.02 * torch.randn(part.shape, device=device))


# --- torchtitan, and its recipe ---


def recipe(c: LlamaConfig, checkpointing: str, device, reshard=True, fp8=False):
    """What torchtitan 0.2 does with a Llama 3, written out in plain PyTorch: blocks compiled one by one, FSDP2 with
    fp32 masters and bf16 compute, a compiled loss over whole logits, fused AdamW. It has three advantages over the
    original: the head is tied to the embedding (262 million fewer parameters), RoPE is real-valued (inductor cannot
    fuse torchtitan's complex product), and selective checkpointing keeps cuDNN's attention (torchtitan keeps flash's
    and recomputes cuDNN's).

    reshard=False: the blocks' weights stay gathered from forward to backward. fp8: torchao's float8 in the blocks,
    rowwise scales and weight gradients in bfloat16, as ours: the faster of its rowwise recipes for this model.
    """
    with torch.device("meta"):
        model = recipe_model(c)
    if fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    options = fsdp_options(device)
    for i, block in enumerate(model.layers):
        # compile the block inside FSDP: the compiler cannot trace FSDP's hooks, so they stay outside the graph
        model.layers[i] = torch.compile(checkpointed(block, checkpointing), fullgraph=True)
        fully_shard(model.layers[i], reshard_after_forward=reshard, **options)
    if not c.tie_embeddings:  # torchtitan's groups; a tied weight belongs to both ends, so to the root
        fully_shard(model.tok_embeddings, reshard_after_forward=reshard, **options)
        fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    materialize(model, device)
    loss = torch.compile(whole_loss)
    return model, lambda tokens, targets: loss(model(tokens), targets), adamw(model)


class RecipeAttention(plain_llama.Attention):
    """K and V repeated for each query head, as in torchtitan; cuDNN's attention if it can."""

    def forward(self, x, cos, sin):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.q_proj, self.k_proj, self.v_proj))
        q = plain_llama.rotate(q, cos, sin)  # (B, T, H, D)
        k = plain_llama.rotate(k, cos, sin)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):  # not the name below: the compiler knows this function
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def recipe_model(c: LlamaConfig) -> plain_llama.PlainLlama:
    model = plain_llama.PlainLlama(c)
    for layer in model.layers:
        layer.attn = RecipeAttention(c)
    return model


def materialize(model: plain_llama.PlainLlama, device) -> plain_llama.PlainLlama:
    """Move from the meta device to this one, with random weights."""
    model.to_empty(device=device)
    if model.config.tie_embeddings:  # to_empty gave the head a separate weight
        model.lm_head.weight = model.tok_embeddings.weight
    randomize(model, device)
    return model


def whole_loss(logits, targets):
    """The mean cross-entropy of whole logits (B, T, V). Compiled, it never writes their fp32 copy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def every_second_matmul():
    """torchtitan's 'op' policy: keep attention and the first, third, fifth, ... matmul of a block."""
    aten = torch.ops.aten
    backends = ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")
    keep = {aten.mm.default, *(getattr(aten, f"_scaled_dot_product_{name}").default for name in backends)}
    n_matmuls = Counter()  # forward and recomputation count separately

    def policy(ctx, op, *args, **kwargs):
        is_matmul = op == aten.mm.default
        n_matmuls[ctx.is_recompute] += is_matmul
        if op in keep and not (is_matmul and n_matmuls[ctx.is_recompute] % 2 == 0):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpointed(block: nn.Module, checkpointing: str) -> nn.Module:
    if checkpointing == "none":
        return block
    options = {"context_fn": every_second_matmul} if checkpointing == "selective" else {}
    return checkpoint_wrapper(block, preserve_rng_state=False, **options)


def mesh_of_all_ranks(device: torch.device):
    store = {"store": dist.HashStore()} if world_size == 1 else {}  # else torchrun's
    # gloo beside NCCL: the norm of offloaded gradients is summed on the CPU
    backend, bound = ("cpu:gloo,cuda:nccl", {"device_id": device}) if device.type == "cuda" else ("gloo", {})
    dist.init_process_group(backend, rank=rank, world_size=world_size, **store, **bound)
    return init_device_mesh(device.type, (world_size,))


def fsdp_options(device: torch.device) -> dict:
    # cast_forward_inputs would round cos and sin; the residual stream is bf16 from the embedding on
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return {"mesh": mesh_of_all_ranks(device), "mp_policy": policy}


def torchtitan(c: LlamaConfig, checkpointing: str, device):
    """The package itself: its model, checkpointing, compilation and sharding. It cannot tie the embedding."""
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
        saved = parallelize._op_sac_save_list
        parallelize.apply_ac(model, checkpoint, model_compile_enabled=True, op_sac_save_list=saved)
    parallelize.apply_compile(model, Compile(enable=True))
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    parallelize.apply_fsdp(model, mesh_of_all_ranks(device), pp_enabled=False, **dtypes)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    loss = torch.compile(cross_entropy_loss)
    return model, lambda tokens, targets: loss(model(tokens), targets), adamw(model)


def torchtitan_03(c: LlamaConfig, checkpointing: str, device):
    """The package torchtitan 0.3: its model, tied as c says, compiled and sharded by its parallelize_llama, its chunked
    loss, its attention by FlashAttention 4, and its CUDA graph of forward and backward.

    Two things make it faster than its own loop: masks are made once, not at each step, and as each sequence is one
    document, RoPE reads no positions.
    """
    model = torchtitan_03_model(c, checkpointing, device)
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.cudagraph import wrap_with_cuda_graph
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    chunked_loss = ChunkedLossWrapper.Config().build(compile_config=CompileConfig(enable=True))
    chunked_loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizer = adamw(model)
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # the graph adds to the same tensors

    @functools.cache
    def mask_of(batch: int, block: int):
        return create_varlen_metadata_for_document(torch.arange(block, device=device).expand(batch, block))

    def forward_backward(tokens, targets, n_targets, _):
        loss, _ = chunked_loss(model(tokens, attention_masks=mask_of(*tokens.shape)), targets, n_targets)
        loss.backward()
        return loss

    run = wrap_with_cuda_graph(forward_backward)

    def loss_of(tokens, targets):
        n_targets = torch.tensor(world_size * tokens.numel(), device=device)
        loss = run(tokens, targets, n_targets, {})
        return (world_size * loss.detach()).requires_grad_()  # whose backward does nothing more

    return model, loss_of, optimizer


def torchtitan_03_model(c: LlamaConfig, checkpointing: str, device) -> nn.Module:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models import llama3
    from torchtitan.tools import utils as tools

    tools.get_cuda_flash_attention_impl = lambda: "FA4"  # on Hopper it would ask for 3, of which there is no package
    scaling = c.rope_scaling or {}
    scaling = {"scaling_factor" if key == "factor" else key: value for key, value in scaling.items()}
    rope = llama3.ComplexRoPE.Config(
        dim=c.head_dim, max_seq_len=c.block_size, theta=c.rope_theta, scaling="llama" if scaling else "none", **scaling
    )
    layers = llama3._build_llama3_layers(
        n_layers=c.n_layer, dim=c.n_embd, n_heads=c.n_head, n_kv_heads=c.n_kv_head, hidden_dim=c.ffn_dim, rope=rope,
        attn_backend="varlen",
    )  # fmt: skip
    config = llama3.Llama3Model.Config(
        dim=c.n_embd, vocab_size=c.vocab_size, layers=layers, enable_weight_tying=c.tie_embeddings,
        tok_embeddings=llama3.Embedding.Config(num_embeddings=c.vocab_size, embedding_dim=c.n_embd),
        norm=llama3.RMSNorm.Config(normalized_shape=c.n_embd, eps=c.norm_eps),
        lm_head=llama3.Linear.Config(in_features=c.n_embd, out_features=c.vocab_size),
    )  # fmt: skip
    with torch.device("meta"):
        model = config.build()
    mesh_of_all_ranks(device)  # the process group, of which the package makes its own mesh
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    utils.set_spmd_backend(parallelism.spmd_backend)
    recomputed = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    llama3.parallelize_llama(
        model, parallel_dims=ParallelDims.from_config(parallelism, world_size), training=TrainingConfig(),
        parallelism=parallelism, compile_config=CompileConfig(enable=True), ac_config=recomputed[checkpointing],
        dump_folder="",
    )  # fmt: skip
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)  # RoPE's tables too
    randomize(model, device)
    return model


# --- Hugging Face ---


def hf_model(c: LlamaConfig, checkpointing: str, device, compile_mode="", liger="", cudnn=False, dtype=torch.bfloat16):
    """transformers' LlamaForCausalLM and its loss.

    compile_mode: under torch.compile, with causal attention without a mask, as transformers does uncompiled;
    reduce-overhead replays CUDA graphs; blocks compiles the blocks one by one. liger: with all of Liger-Kernel's
    patches, or only its loss, the fused linear cross-entropy. cudnn: its attention, which PyTorch takes by itself only
    on Hopper, from 2.11 on.
    """
    import transformers

    assert checkpointing != "selective", NO_SELECTIVE
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(**dict.fromkeys(("rope", "rms_norm", "swiglu"), liger == "all"))
    hf_config = transformers.LlamaConfig(**write_config(c, "bytes", "bfloat16", {}, {}), use_cache=False)
    with torch.device(device):  # from_config, unlike .to(dtype), leaves RoPE's frequencies in fp32
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        model = transformers.AutoModelForCausalLM.from_config(hf_config, **options).train()
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compile_mode:
        from transformers.models.llama import modeling_llama

        modeling_llama.create_causal_mask = lambda *args, **kwargs: None  # compiled, it would build a (T, T) mask
    if compile_mode == "blocks":
        for layer in model.model.layers:
            layer.compile()
    run = torch.compile(model, mode=compile_mode) if compile_mode not in ("", "blocks") else model
    return model, hf_loss(run, *([CUDNN_ATTENTION] if cudnn else []))


def hf_loss(model: Callable, *contexts: Callable) -> Callable:
    """The loss of Hugging Face's model on tokens and targets, which are shifted already, in these contexts."""

    def loss_of(tokens, targets):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return model(input_ids=tokens, labels=targets, shift_labels=targets).loss

    return loss_of


def hf(c: LlamaConfig, checkpointing: str, device, optimizer=adamw, **options):
    """transformers' model in pure bf16: weights, gradients and optimizer states."""
    model, loss_of = hf_model(c, checkpointing, device, **options)
    return model, loss_of, optimizer(model)


def bitsandbytes_adamw8bit(model: nn.Module) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(trained_parameters(model), **ADAMW)


def galore_adamw8bit(model: nn.Module) -> torch.optim.Optimizer:
    """galore-torch's 8-bit GaLore, of rank 128 and otherwise its own defaults, on the matrices."""
    from galore_torch import GaLoreAdamW8bit

    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in trained_parameters(model) if not any(p is matrix for matrix in matrices)]
    galore = {"params": matrices, "rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    return GaLoreAdamW8bit([{"params": others}, galore], **ADAMW)


def hf_liger_lora(c: LlamaConfig, checkpointing: str, device, nf4=False):
    """hf with liger, frozen in bfloat16, or bitsandbytes' NF4 with double quantization, and peft's adapters of rank 16
    on its seven projections, in float32 under autocast, peft's default."""
    model, _ = hf_model(c, checkpointing, device, liger="all")
    if nf4:
        quantize_as_bitsandbytes(model.model.layers, device)
    model = with_peft(model)
    for module in model.modules():  # no float32 copies of the inputs: autocast rounds them anyway, so copies would only
        module.cast_input_dtype_enabled = False  # cost time and memory; peft's 4-bit layers skip them under autocast
    return model, hf_loss(model, partial(torch.autocast, device.type, torch.bfloat16)), adamw(model)


def unsloth_qlora(c: LlamaConfig, checkpointing: str, device, offload=False):
    """unsloth with its own settings and adapters of rank 16: NF4, fused kernels, compiled blocks; cuDNN's attention.
    offload: its checkpointing that keeps the blocks' inputs in CPU memory; else none, or PyTorch's.

    It sizes the chunks of its loss by the free memory, so it is shown what this process may take.
    """
    assert checkpointing != "selective", NO_SELECTIVE
    card_bytes = torch.cuda.get_device_properties(device).total_memory
    limit = int(card_bytes * torch.cuda.get_per_process_memory_fraction(device))
    torch.cuda.mem_get_info = lambda *args: (limit - torch.cuda.memory_reserved(device), limit)
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(ROOT / "out" / "unsloth"))  # the code that it writes
    import unsloth  # before transformers, which it patches
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    mode = "unsloth" if offload else checkpointing == "full"
    with tempfile.TemporaryDirectory() as folder:  # it starts from published weights and their tokenizer
        model, _ = hf_model(c, "none", device)
        model.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b").save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        options = {"max_seq_length": c.block_size, "use_gradient_checkpointing": mode}
        model, _ = unsloth.FastLanguageModel.from_pretrained(folder, **options, fix_tokenizer=False)
    model = unsloth.FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32, use_gradient_checkpointing=mode)
    model = unsloth.FastLanguageModel.for_training(model)  # else it does not recompute
    return model, hf_loss(model, partial(torch.autocast, device.type, torch.bfloat16), CUDNN_ATTENTION), adamw(model)


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
                    child.weight.detach().cpu(),  # quantized on its way to the GPU
                    requires_grad=False, quant_type="nf4", compress_statistics=True,
                )  # fmt: skip
                setattr(module, name, packed.to(device))


def hf_masters(c: LlamaConfig, checkpointing: str, device, liger="", offload=False):
    """float32 weights, gradients and optimizer states, which FSDP2 casts to bf16 for forward and backward, block by
    block. offload: all of them in CPU memory, where AdamW runs too."""
    model, loss_of = hf_model(c, checkpointing, "meta", liger=liger, dtype=torch.float32)
    options = fsdp_options(device)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)  # embedding and head: one parameter if tied
    model.to_empty(device="cpu" if offload else device)
    if c.tie_embeddings:  # to_empty gave the head a separate weight
        model.lm_head.weight = model.model.embed_tokens.weight
    randomize(model, device)
    torch.cuda.empty_cache()  # of the random draws
    with torch.device(device):  # its frequencies are not parameters
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if offload:
        torch.set_num_threads(max(1, cpu_cores() // world_size))  # AdamW's
    return model, loss_of, adamw(model)


# --- The table ---


class Trainer(NamedTuple):
    title: str  # in tables
    build: Callable | None = None  # of a peer; None: train.py itself
    flags: str = ""  # train.py's


PEERS = {
    "recipe": Trainer("torchtitan's recipe", recipe),
    "recipe-fp8": Trainer("torchtitan's recipe, fp8", partial(recipe, fp8=True)),
    "recipe-zero2": Trainer("torchtitan's recipe, ZeRO-2", partial(recipe, reshard=False)),
    "torchtitan": Trainer("torchtitan", torchtitan),
    "torchtitan-0.3": Trainer("torchtitan 0.3", torchtitan_03),
    # pure bfloat16
    "hf": Trainer("Hugging Face", hf),
    "hf-compiled": Trainer("Hugging Face compiled", partial(hf, compile_mode="default")),
    "hf-graphs": Trainer("Hugging Face compiled, CUDA graphs", partial(hf, compile_mode="reduce-overhead")),
    "hf-liger": Trainer("Hugging Face + Liger", partial(hf, liger="all")),
    "hf-liger-cudnn": Trainer("Hugging Face + Liger, cuDNN", partial(hf, liger="all", cudnn=True)),
    "hf-fastest": Trainer("Hugging Face, compiled blocks, Liger's loss, cuDNN",
                          partial(hf, compile_mode="blocks", liger="loss", cudnn=True)),
    "hf-liger-8bit": Trainer("Hugging Face + Liger + bitsandbytes",
                             partial(hf, liger="all", optimizer=bitsandbytes_adamw8bit)),
    "hf-liger-galore": Trainer("Hugging Face + Liger + GaLore",
                               partial(hf, liger="all", optimizer=galore_adamw8bit)),
    # adapters
    "hf-liger-lora": Trainer("Hugging Face + Liger + peft, LoRA", hf_liger_lora),
    "hf-liger-qlora": Trainer("Hugging Face + Liger + peft, QLoRA", partial(hf_liger_lora, nf4=True)),
    "unsloth-qlora": Trainer("unsloth, QLoRA", unsloth_qlora),
    "unsloth-qlora-long": Trainer("unsloth, QLoRA, inputs on the CPU", partial(unsloth_qlora, offload=True)),
    # float32 weights, bfloat16 compute
    "hf-masters": Trainer("Hugging Face", hf_masters),
    "hf-liger-masters": Trainer("Hugging Face + Liger", partial(hf_masters, liger="all")),
    "hf-offload": Trainer("Hugging Face", partial(hf_masters, offload=True)),
    "hf-liger-offload": Trainer("Hugging Face + Liger", partial(hf_masters, liger="all", offload=True)),
}  # fmt: skip
