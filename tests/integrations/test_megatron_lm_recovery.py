"""Megatron-LM's ``pretrain``, run again in place after a rank was killed.

``megatron.training`` is in no package. What stands for it makes the calls of core_v0.16.1 or of the
main branch, over Megatron-Core's own model and distributed optimizer.
"""

import hashlib
import os
import sys
import warnings
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.integrations import megatron_lm_recovery
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.recovery.megatron_training import (
    MICRO_BATCH,
    NUM_STEPS,
    Task,
    build,
    gradients,
    schedule_of,
)
from tests.support.restarts import Wrappers, run_respawned
from tests.support.tensors import bits

pytest.importorskip("einops", reason="Megatron-Core needs it for instances of its optimizer")

NUM_RANKS = 2
FAULTS = ((3, "reached", 1, "kill"),)


def arguments() -> Namespace:
    """What Megatron-LM's parser returns."""
    samples = {
        f"{kind}_samples": 0 for kind in ("consumed_train", "consumed_valid", "skipped_train")
    }
    flops = {"num_floating_point_operations_so_far": 0}
    return Namespace(micro_batch_size=MICRO_BATCH, iteration=0, **samples, **flops)


def megatron_training(task: Task) -> tuple[Any, Any]:
    """What is imported as training.py and global_vars.py."""
    names = ("", ".training", ".inprocess_restart", ".global_vars")
    modules: list[Any] = [ModuleType(f"megatron.training{name}") for name in names]
    sys.modules |= {module.__name__: module for module in modules}
    _, training, restart, variables = modules

    def set_global_variables(args: Namespace | None) -> None:
        assert args is None or variables._GLOBAL_ARGS is None, "args is already initialized"
        variables._GLOBAL_ARGS = args

    def get_args() -> Namespace:
        args: Namespace | None = variables._GLOBAL_ARGS
        assert args is not None, "args is not initialized."
        return args

    def setup_model_and_optimizer(model_type: object) -> tuple[Any, Any, Any]:
        model, optimizer = build(task)
        return [model], optimizer, schedule_of(optimizer)

    def train_step(
        forward_step: object, model: Any, optimizer: Any, schedule: Any, iteration: int
    ) -> None:
        rank = dist.get_rank()
        task.reach(iteration, "reached", rank)
        task.note(rank, iteration, gradients(model[0], optimizer, iteration, 1))
        optimizer.step()
        schedule.step(increment=NUM_RANKS * MICRO_BATCH)

    def destroy_state() -> None:
        set_global_variables(None)
        parallel_state.destroy_model_parallel()

    variables._GLOBAL_ARGS, variables.set_global_variables = None, set_global_variables
    training.get_args, training.mpu = get_args, parallel_state
    training.get_num_microbatches = lambda: 1
    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.train_step = train_step
    restart.destroy_state = destroy_state
    return training, variables


def on_rank(rank: int, wrappers: Wrappers, task: Task, parses_first: bool) -> Any:
    """Body of a rank: the script. Up to 0.16 ``pretrain`` parses the arguments, on main this."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    training, variables = megatron_training(task)

    def pretrain() -> tuple[int, list[str]]:
        if not parses_first:
            variables.set_global_variables(arguments())
        args = training.get_args()
        dist.init_process_group("interruptible_gloo", timeout=timedelta(seconds=60))
        parallel_state.initialize_model_parallel(
            num_distributed_optimizer_instances=NUM_RANKS, create_gloo_process_groups=False
        )
        model, optimizer, schedule = training.setup_model_and_optimizer("model")
        for iteration in range(args.iteration, NUM_STEPS):
            training.train_step(None, model, optimizer, schedule, iteration=iteration)
            args.consumed_train_samples += NUM_RANKS * MICRO_BATCH
        digests = [hashlib.sha256(bits(one)).hexdigest() for one in model[0].parameters()]
        return args.consumed_train_samples, digests

    if parses_first:
        variables.set_global_variables(arguments())
    manager, limits = CheckpointManager(timeout_s=60), wrappers.settings() | {"max_attempts": 4}
    with cpu_stand_ins():
        return megatron_lm_recovery.restarting(pretrain, manager, **limits)()


@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_a_killed_rank_of_megatron_lm_comes_back_bit_for_bit(tmp_path: Path) -> None:
    found, losses = [], []
    for name, parses_first, faults in (
        ("quiet", False, ()),
        ("0.16", False, FAULTS),
        ("main", True, FAULTS),
    ):
        task = Task(tmp_path / name, 1, 1, faults)
        task.directory.mkdir()
        results, died = run_respawned(NUM_RANKS, on_rank, task, parses_first)
        assert died == [rank for _, _, rank, _ in faults], results
        found.append(results)
        losses.append(task.losses())

    assert found[0][0][0] == NUM_STEPS * NUM_RANKS * MICRO_BATCH, found
    assert found[1:] == found[:1] * 2
    assert losses[1:] == losses[:1] * 2
