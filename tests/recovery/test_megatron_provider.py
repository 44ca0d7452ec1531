"""A Megatron-Core GPT with two instances of its distributed optimizer: lost ranks come back."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.cli.demo.main import ModelSize, ParallelLayout
from dist_ckpt_strategies.cli.demo.rank import build_model
from dist_ckpt_strategies.recovery import CheckpointManager
from dist_ckpt_strategies.recovery.megatron_provider import MegatronStateProvider
from tests.support.host_streams import host_streams
from tests.support.ranks import run_processes
from tests.support.tensors import bits

pytest.importorskip("einops", reason="Megatron-Core needs it for instances of its optimizer")

NUM_STEPS = 4


def make(size: ModelSize, noise: float) -> tuple[Any, MegatronStateProvider, Any]:
    """A model in Megatron's DDP, its provider and its optimizer."""
    module = build_model(size, ParallelLayout(dp=4))
    with torch.no_grad():
        for param in module.parameters():
            param.add_(noise)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        num_distributed_optimizer_instances=2,
    )
    model = DistributedDataParallel(config=module.config, ddp_config=ddp, module=module)
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [model])
    return model, MegatronStateProvider([model], optimizer), optimizer


def gradients(model: Any, optimizer: Any, size: ModelSize) -> float:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    rows = torch.randint(size.vocab, (2, size.sequence_length + 1))
    places = torch.arange(size.sequence_length).expand(2, -1)
    loss = model(rows[:, :-1], places, None, labels=rows[:, 1:]).float().mean()
    loss.backward()
    finalize_model_grads([model])
    return float(loss.detach())


def trained(rank: int, fault: str | None) -> Any:
    """Body of a rank: train; in step 2 rank 1 is lost, after the vote or in the next forward."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    size = ModelSize(num_layers=2, hidden=32, num_heads=2, num_query_groups=2)
    with cpu_stand_ins(), host_streams():
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
        model, provider, optimizer = make(size, 0.0)
        manager = CheckpointManager(timeout_s=60)
        manager.track(provider)
        torch.manual_seed(rank)
        losses: dict[int, float] = {}
        while provider.step < NUM_STEPS:
            manager.begin_step()
            losses[provider.step] = gradients(model, optimizer, size)
            provider.finish_gradients()
            is_fault = provider.step == 2 and fault is not None
            if not (is_fault and fault == "before the vote"):
                manager.vote()
            if is_fault:
                fault = None
                manager = CheckpointManager(timeout_s=60) if rank == 1 else manager
                model, provider, optimizer = make(size, 0.5)
                assert manager.try_checkpointless_load(provider), manager.last_failure
                manager.track(provider)
                continue
            with manager.updating():
                provider.apply_update()
            provider.gather_weights()
            manager.end_step()
        tensors = {f"{p}/{n}": bits(t) for p, ts in provider.parts().items() for n, t in ts.items()}
        return losses, tensors, provider.objects(), bits(torch.rand(4))


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    found: list[Any] = run_processes(4, trained, None, timeout_s=150)
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("fault", ["before the vote", "after the vote"])
def test_a_megatron_training_continues_bit_for_bit(fault: str, undisturbed: list[Any]) -> None:
    found = run_processes(4, trained, fault, timeout_s=150)

    assert not [one for one in [*found, *undisturbed] if isinstance(one, Exception)], found
    assert found == undisturbed
