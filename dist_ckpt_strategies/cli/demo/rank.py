"""One rank of the demonstration: it trains a GPTModel, saves or loads, and takes digests."""

import pickle
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.cli.demo.main import (
    FULLY_RESHARDABLE,
    ModelSize,
    Outcome,
    ParallelLayout,
    RankTask,
)
from dist_ckpt_strategies.device import host_view
from dist_ckpt_strategies.errors import needs_megatron_core
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

with needs_megatron_core():
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedTensor,
        apply_factories,
        is_main_replica,
    )
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

_SEED = 1234
_TEXT = "alice29.txt"


def carry_out(task: RankTask) -> Outcome:
    """Carry out a task on one rank, over the world's process group. Collective: world."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist_ckpt_strategies.register()
    with cpu_stand_ins():
        parallel_state.initialize_model_parallel(task.layout.tp, task.layout.pp)
        rank = _Rank(task)
        (rank.resume if task.resumes else rank.train)()
    return Outcome(rank.losses, rank.digests)


def build_model(size: ModelSize, layout: ParallelLayout) -> Float16Module:
    """This rank's share of a fresh GPTModel in bfloat16, on the CPU.

    Megatron's process groups have to exist. The numbers depend on the pipeline layout, so a model
    that was built in another one is not equal before the checkpoint is loaded.
    """
    torch.manual_seed(_SEED)
    model_parallel_cuda_manual_seed(_SEED, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=size.num_layers,
        hidden_size=size.hidden,
        num_attention_heads=size.num_heads,
        num_query_groups=size.num_query_groups,
        ffn_hidden_size=size.ffn_hidden,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=size.vocab,
        max_sequence_length=size.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=size.ties_embeddings,
        position_embedding_type="learned_absolute",
    )
    return Float16Module(config, model)


def build_optimizer(
    model: Float16Module, num_instances: int = 1, **options: Any
) -> tuple[Any, Any]:
    """The model in Megatron's DDP, and its distributed Adam, whose OptimizerConfig has ``options``.

    With several instances each holds the whole state, and groups over gloo are not used.
    """
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        num_distributed_optimizer_instances=num_instances,
    )
    wrapped = DistributedDataParallel(model.config, wrapping, model)
    config = OptimizerConfig(
        optimizer="adam",
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        **options,
    )
    optimizer = get_megatron_optimizer(
        config, [wrapped], use_gloo_process_groups=num_instances == 1
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


class _Rank:
    """One rank's model, optimizer, losses and digests. Every method is collective over the world.

    The parallel layout has to be set up in Megatron's parallel_state.
    """

    def __init__(self, task: RankTask) -> None:
        self._task = task
        self.losses: dict[int, float] = {}
        self.digests: dict[str, str] = {}
        text = (resources.files("dist_ckpt_strategies.cli") / "data" / _TEXT).read_bytes()
        self._text = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
        model = build_model(task.training.size, task.layout)
        self._model, self._optimizer = build_optimizer(
            model, lr=5e-4, weight_decay=0.01, adam_beta2=0.95, clip_grad=1.0
        )
        # The form of the checkpoint's content, as Megatron-LM records it.
        self._content_metadata = {
            "distrib_optim_sharding_type": task.training.sharding_type,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }

    def train(self) -> None:
        """Train, save and train on."""
        num_before = self._task.training.num_before_save
        self._iterate("train", 0, num_before)
        self._take_digests()
        with self._step("save"):
            dist_checkpointing.save(
                {**self._sharded_state_dict(is_loading=False), "iteration": num_before},
                str(self._task.checkpoint),
                (self._task.training.backend, 1),
                content_metadata=self._content_metadata,
            )
        self._iterate("train on", num_before, self._task.training.num_after_save)

    def resume(self) -> None:
        """Load and train on."""
        two_stage = None
        if self._task.two_stage:
            group = parallel_state.get_data_parallel_group()
            two_stage = TwoStageDataParallelLoadShardedStrategy(group)
        with self._step("load"):
            wanted = self._sharded_state_dict(is_loading=True)
            state = dist_checkpointing.load(wanted, str(self._task.checkpoint), two_stage)
            self._model.module.module.load_state_dict(state["model"], strict=True)
            self._optimizer.load_state_dict(state["optimizer"])
        self._take_digests()
        self._iterate("resume", int(state["iteration"]), self._task.training.num_after_save)

    def _iterate(self, step: str, first: int, count: int) -> None:
        with self._step(f"{step}, iterations {first}-{first + count - 1}"):
            for iteration in range(first, first + count):
                self.losses[iteration] = self._train_on_batch(iteration)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Print a step on rank 0 when the last rank has left it."""
        began = time.monotonic()
        yield
        dist.barrier()
        if dist.get_rank() == 0:
            seconds = time.monotonic() - began
            print(f"{self._task.layout!s:<16} {name:<48} {seconds:6.1f} s", flush=True)  # noqa: T201

    def _train_on_batch(self, iteration: int) -> float:
        """Train on the batch of this iteration; the loss before the change, over all ranks."""
        training, layout = self._task.training, self._task.layout
        micro_batch = training.global_batch // (layout.dp * layout.pp)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self._micro_batches(iteration, micro_batch),
            model=[self._model],
            num_microbatches=layout.pp,
            seq_length=training.size.sequence_length,
            micro_batch_size=micro_batch,
            forward_only=False,
        )
        self._optimizer.step()
        # Of all micro-batches, on the ranks that computed a loss.
        total = sum((loss["loss"] for loss in losses), torch.zeros(()))
        mean = torch.tensor([total, float(len(losses))], dtype=torch.float64)
        dist.all_reduce(mean)
        return float(mean[0] / mean[1])

    def _micro_batches(self, iteration: int, micro_batch: int) -> Iterator[torch.Tensor]:
        """This rank's share of the iteration's sequences, ``(micro_batch, length + 1)`` each.

        The whole batch depends on the iteration alone, so every layout trains on the same one.
        """
        training = self._task.training
        length = training.size.sequence_length
        generator = torch.Generator().manual_seed(_SEED + iteration)
        starts = torch.randint(
            len(self._text) - length - 1, (training.global_batch,), generator=generator
        )
        rows = torch.stack([self._text[start : start + length + 1] for start in starts.tolist()])
        share = rows.chunk(self._task.layout.dp)[parallel_state.get_data_parallel_rank()]
        return iter(share.split(micro_batch))

    def _sharded_state_dict(self, *, is_loading: bool, **metadata: str) -> dict[str, Any]:
        """The state that Megatron-LM's training script passes to ``dist_checkpointing``."""
        content = self._content_metadata | metadata
        model = self._model.module.module.sharded_state_dict(metadata=content)
        optimizer = self._optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=content
        )
        return {"model": model, "optimizer": optimizer}

    def _take_digests(self) -> None:
        """Of every weight and optimizer state, whole and in model space."""
        state = self._sharded_state_dict(
            is_loading=False, distrib_optim_sharding_type=FULLY_RESHARDABLE
        )
        self.digests = _gather_digests(state)


def forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[Any, Any]:
    """Megatron's forward step: the model's output and the function that makes it a loss."""
    rows = next(batches)
    positions = torch.arange(rows.shape[1] - 1).expand(rows.shape[0], -1)
    output = model(rows[:, :-1].contiguous(), positions, None, labels=rows[:, 1:].contiguous())
    return output, _mean_loss


def _mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _gather_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """On rank 0 the digest of every whole tensor, by key; elsewhere nothing. Changes ``state``.

    Rank 0 receives the whole state at once; the demonstration's is small. A ValueError if the
    shards of a tensor do not cover it exactly once. Collective: world.
    """
    apply_factories(state)
    # Clones, because pickling a view would send the whole buffer that it looks into.
    shards = [
        (shard.key, tuple(shard.global_shape), shard.global_slice(), shard.data.detach().clone())
        for shard in nested_values(state)
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id)
    ]
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(shards, gathered)
    wholes: dict[str, torch.Tensor] = {}
    counts: Counter[str] = Counter()
    for key, shape, region, data in chain.from_iterable(gathered or ()):
        wholes.setdefault(key, torch.zeros(shape, dtype=data.dtype))[region] = data
        counts[key] += data.numel()
    for key, whole in wholes.items():
        if counts[key] != whole.numel():
            raise ValueError(f"{key}: shards hold {counts[key]} elements of {whole.numel()}")
    return {key: _digest(whole) for key, whole in sorted(wholes.items())}


def _digest(tensor: torch.Tensor) -> str:
    content = xxhash.xxh3_128_hexdigest(host_view(tensor).tobytes())
    return f"{tensor.dtype} {tuple(tensor.shape)} {content}"


if __name__ == "__main__":
    task_path, outcome_path = map(Path, sys.argv[1:])
    outcome = carry_out(pickle.loads(task_path.read_bytes()))  # noqa: S301 - of our own parent
    if dist.get_rank() == 0:
        outcome_path.write_bytes(pickle.dumps(outcome))
