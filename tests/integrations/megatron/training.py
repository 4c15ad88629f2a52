"""A small GPT of Megatron's, its optimizer and its training loop, for the tests; every choice is an argument."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.integrations.environments import stand_alone
from tests.integrations.megatron import cpu

VOCABULARY, LENGTH, SAMPLES = 64, 8, 48


class Training(NamedTuple):
    """What Megatron-LM's `setup_model_and_optimizer` returns, and its arguments."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    args: argparse.Namespace


def parser() -> argparse.ArgumentParser:
    """The arguments; those of Megatron-LM have its names."""
    made = argparse.ArgumentParser()
    made.add_argument("--work", type=Path, required=True)
    made.add_argument("--tp", type=int, default=1)
    made.add_argument("--pp", type=int, default=1)
    made.add_argument("--vpp", type=int, default=None)
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--ep", type=int, default=1)
    made.add_argument("--experts", type=int, default=None)
    made.add_argument("--distributed", action="store_true")
    made.add_argument("--bf16", action="store_true")
    made.add_argument("--fp16", action="store_true")
    made.add_argument("--tied", action="store_true")
    made.add_argument("--dropout", type=float, default=0.1)
    made.add_argument("--family", default=None)
    made.add_argument("--bias", action="store_true")
    made.add_argument("--qk-norm", action="store_true")
    made.add_argument("--seed", type=int, default=11)
    made.add_argument("--save", default=None)
    made.add_argument("--load", default=None)
    made.add_argument("--ckpt-step", type=int, default=None)
    made.add_argument("--finetune", action="store_true")
    made.add_argument("--no-load-optim", action="store_true")
    made.add_argument("--no-save-optim", action="store_true")
    made.add_argument("--no-load-rng", action="store_true")
    made.add_argument("--exit-on-missing-checkpoint", action="store_true")
    return made


def huggingface(args: argparse.Namespace) -> dict[str, Any] | None:
    """The config.json of the model, if it is to have Hugging Face's names."""
    if args.family is None:
        return None
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[args.family]
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": args.family, "vocab_size": VOCABULARY, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": LENGTH, "rope_theta": 10000.0, "attention_bias": False,
        "tie_word_embeddings": args.tied, "dtype": "float32",
    }  # fmt: skip


@contextmanager
def parallel(args: argparse.Namespace) -> Iterator[None]:
    """Megatron's process groups, over gloo."""
    cpu.pretend()
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    stand_alone()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tp, args.pp, virtual_pipeline_model_parallel_size=args.vpp, expert_model_parallel_size=args.ep
    )
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def build(args: argparse.Namespace) -> Training:
    """The model in its wrappers, optimizer and scheduler; `args` gets what Megatron-LM's arguments have besides."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=4 if args.vpp else args.layers,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        add_bias_linear=False,
        add_qkv_bias=args.bias,
        qk_layernorm=args.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        expert_model_parallel_size=args.ep,
        num_moe_experts=args.experts,
        moe_token_dispatcher_type="allgather",
        overlap_p2p_comm=bool(args.vpp),  # without it, two stages would mix up what they send forward and backward
        batch_p2p_comm=not args.vpp,
        pipeline_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=args.experts, qk_layernorm=args.qk_norm, normalization="RMSNorm")
    chunks = []
    for stage in range(args.vpp or 1):
        virtual = stage if args.vpp else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=not args.vpp, vp_stage=virtual)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=not args.vpp, vp_stage=virtual)
        gpt = GPTModel(
            config, spec, VOCABULARY, LENGTH, pre_process=first, post_process=last,
            share_embeddings_and_output_weights=args.tied, position_embedding_type="rope", vp_stage=virtual,
        )  # fmt: skip
        chunks.append(Float16Module(config, gpt) if args.bf16 or args.fp16 else gpt)
    about = DistributedDataParallelConfig(
        use_distributed_optimizer=args.distributed, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    model = [
        DistributedDataParallel(config, about, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.01, min_lr=0.001, weight_decay=0.1, clip_grad=1.0, bf16=args.bf16, fp16=args.fp16,
            initial_loss_scale=128.0, params_dtype=config.params_dtype, use_distributed_optimizer=args.distributed,
            hysteresis=2, loss_scale_window=3,
        ),
        model,
    )  # fmt: skip
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 0.01, 0.001, 3, 60, "cosine", 0.1, 0.1, 60, "constant")
    for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups"):
        setattr(args, name, getattr(config, name))
    args.position_embedding_type, args.consumed_train_samples = "rope", 0
    return Training(model, optimizer, scheduler, args)


def rows(args: argparse.Namespace, step: int) -> list[int]:
    """The samples of this data-parallel rank at a step, from the samples consumed so far, as Megatron's sampler does."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    start = args.consumed_train_samples
    epoch = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(start // SAMPLES)).tolist()
    return [epoch[(start + index) % SAMPLES] for index in range(rank, 4, size)]


def step(training: Training, number: int) -> tuple[float, list[int]]:
    """One step of four samples, as micro-batches of one: this data-parallel rank's loss, and its samples."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    mine = rows(training.args, number)
    data = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    config = training.model[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = training.optimizer.scale_loss
    for chunk in training.model:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()

    def forward(batches: Any, model: Any, *_: Any) -> tuple[Any, Any]:
        tokens = data[next(batches)].unsqueeze(0)
        positions = torch.arange(LENGTH).unsqueeze(0)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        return output, partial(
            lambda loss: (loss.float().mean(), {"loss": loss.detach().float().mean()}),
        )

    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(mine) for _ in training.model] if len(training.model) > 1 else iter(mine),
        model=training.model if len(training.model) > 1 else training.model[0],
        num_microbatches=len(mine),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    training.optimizer.step()
    training.scheduler.step(increment=1)
    training.args.consumed_train_samples += 4
    loss = sum(float(one["loss"]) for one in found) / len(mine) if found else 0.0
    told = torch.tensor([loss], dtype=torch.float64)
    torch.distributed.all_reduce(told, group=parallel_state.get_pipeline_model_parallel_group())  # the last stage has it
    return float(told), mine
