"""The demonstration's training: a GPTModel, Megatron's optimizer, and real text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from dist_ckpt_strategies.cli.demo.task import ModelSize, ParallelLayout, Training

_SEED = 1234
_WEIGHT_DECAY = 0.01
_TEXT = "alice29.txt"


def build_model(size: ModelSize, layout: ParallelLayout) -> Float16Module:
    """This rank's part of a fresh GPTModel in bfloat16, on the CPU.

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
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    )
    return Float16Module(config, model)


class Trainer:
    """One rank's model, optimizer and schedule, and how they become a checkpoint.

    The parallel layout has to be set up in Megatron's parallel_state. Every method is collective
    over the whole world.
    """

    def __init__(self, training: Training, layout: ParallelLayout) -> None:
        """Build everything afresh."""
        self._training = training
        self._layout = layout
        text = (resources.files("dist_ckpt_strategies.cli") / "data" / _TEXT).read_bytes()
        self._text = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
        model = build_model(training.size, layout)
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self._model = DistributedDataParallel(model.config, config, model)
        options = OptimizerConfig(
            optimizer="adam",
            lr=training.peak_learning_rate,
            min_lr=0.0,
            weight_decay=_WEIGHT_DECAY,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self._optimizer = get_megatron_optimizer(options, [self._model])
        num_iterations = training.num_before_save + training.num_after_save
        num_samples = num_iterations * training.global_batch
        self._schedule = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=training.peak_learning_rate,
            min_lr=training.peak_learning_rate / 10,
            lr_warmup_steps=num_samples // 10,
            lr_decay_steps=num_samples,
            lr_decay_style="cosine",
            start_wd=_WEIGHT_DECAY,
            end_wd=_WEIGHT_DECAY,
            wd_incr_steps=num_samples,
            wd_incr_style="constant",
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.grad_scale_func = self._optimizer.scale_loss

    def step(self, iteration: int) -> float:
        """Train on the batch of this iteration; the loss before the change, over all ranks."""
        training = self._training
        micro_batch = training.global_batch // (self._layout.dp * self._layout.pp)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self._micro_batches(iteration, micro_batch),
            model=[self._model],
            num_microbatches=self._layout.pp,
            seq_length=training.size.sequence_length,
            micro_batch_size=micro_batch,
            forward_only=False,
        )
        self._optimizer.step()
        self._schedule.step(increment=training.global_batch)
        # Of all micro-batches, on the ranks that computed a loss.
        total = sum((loss["loss"] for loss in losses), torch.zeros(()))
        mean = torch.tensor([total, float(len(losses))], dtype=torch.float64)
        dist.all_reduce(mean)
        return float(mean[0] / mean[1])

    def sharded_state_dict(
        self, *, is_loading: bool, sharding_type: str | None = None
    ) -> dict[str, Any]:
        """What Megatron-LM's training script hands to ``dist_checkpointing``.

        The optimizer's state has the form ``sharding_type``, by default the training's own.
        """
        metadata = self.content_metadata
        if sharding_type is not None:
            metadata["distrib_optim_sharding_type"] = sharding_type
        model = self._model.module.module.sharded_state_dict(metadata=metadata)
        return {
            "model": model,
            "optimizer": self._optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=metadata
            ),
            "opt_param_scheduler": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``dist_checkpointing.load`` returned for ``sharded_state_dict``."""
        self._model.module.module.load_state_dict(state["model"], strict=True)
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["opt_param_scheduler"])

    @property
    def content_metadata(self) -> dict[str, Any]:
        """The form of the checkpoint's content, as Megatron-LM records it."""
        return {
            "distrib_optim_sharding_type": self._training.sharding_type,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }

    def _micro_batches(self, iteration: int, micro_batch: int) -> Iterator[torch.Tensor]:
        """This rank's share of the iteration's sequences, ``(micro_batch, length + 1)`` each.

        The whole batch depends on the iteration alone, so every layout trains on the same one.
        """
        length = self._training.size.sequence_length
        generator = torch.Generator().manual_seed(_SEED + iteration)
        starts = torch.randint(
            len(self._text) - length - 1, (self._training.global_batch,), generator=generator
        )
        rows = torch.stack([self._text[start : start + length + 1] for start in starts.tolist()])
        share = rows.chunk(self._layout.dp)[parallel_state.get_data_parallel_rank()]
        return iter(share.split(micro_batch))


def forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[Any, Any]:
    """Megatron's forward step: the model's output and the function that makes it a loss."""
    rows = next(batches)
    positions = torch.arange(rows.shape[1] - 1).expand(rows.shape[0], -1)
    output = model(rows[:, :-1].contiguous(), positions, None, labels=rows[:, 1:].contiguous())
    return output, _mean_loss


def _mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}
