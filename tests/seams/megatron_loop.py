"""The training of the seams as Megatron-LM's ``pretrain``, over Megatron-Core's own functions.

``megatron.training`` is in no package. What stands for it makes the calls of core_v0.16.1 or of the
main branch, over Megatron-Core's own model and distributed optimizer.
"""

import os
import signal
import sys
import time
from argparse import Namespace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.integrations import megatron_lm, megatron_lm_recovery
from dist_ckpt_strategies.recovery import MegatronStateProvider
from tests.recovery.megatron_training import MICRO_BATCH, Task, build, gradients, schedule_of
from tests.seams.rank import (
    BARRIER_S,
    CELL,
    LIMIT_S,
    NUM_STEPS,
    PACE_S,
    SAVE_EVERY,
    SHARED,
    Seams,
    digest,
)

KIND = {"distrib_optim_sharding_type": "dp_reshardable"}
TRACKER = SHARED / "root" / "latest_checkpointed_iteration.txt"
LOCAL = "nvidia_resiliency_ext.checkpointing.local"


class Stand:
    """What is imported as training.py, global_vars.py and checkpointing.py."""

    def __init__(self, seams: Seams) -> None:
        self.seams = seams
        names = ("", ".training", ".inprocess_restart", ".global_vars", ".checkpointing")
        modules: list[Any] = [ModuleType(f"megatron.training{name}") for name in names]
        sys.modules |= {module.__name__: module for module in modules}
        _, self.training, restart, self.variables, self.checkpointing = modules
        self.variables._GLOBAL_ARGS = None
        self.variables.set_global_variables = self.set_global_variables
        self.training.get_args = self.checkpointing.get_args = self.get_args
        self.checkpointing.dist_checkpointing = dist_checkpointing
        self.training.mpu, self.training.get_num_microbatches = parallel_state, lambda: 1
        self.training.setup_model_and_optimizer = self.setup_model_and_optimizer
        self.training.train_step = self.train_step
        restart.destroy_state = self.destroy_state
        self.is_told_to_end = False
        self.local: Any = None

    def set_global_variables(self, args: Namespace | None) -> None:
        assert args is None or self.variables._GLOBAL_ARGS is None, "args is already initialized"
        self.variables._GLOBAL_ARGS = args

    def get_args(self) -> Namespace:
        args: Namespace | None = self.variables._GLOBAL_ARGS
        assert args is not None, "args is not initialized."
        return args

    def destroy_state(self) -> None:
        self.set_global_variables(None)
        parallel_state.destroy_model_parallel()

    def setup_model_and_optimizer(self, model_type: object) -> tuple[Any, Any, Any]:
        model, optimizer = build(Task(SHARED, 1, 1, ()))
        self.state = [model], optimizer, schedule_of(optimizer)
        self.load_checkpoint()
        return self.state

    def train_step(
        self, forward_step: object, model: Any, optimizer: Any, schedule: Any, iteration: int
    ) -> None:
        self.seams.reach(iteration, "begin")
        loss = gradients(model[0], optimizer, iteration, 1)
        self.seams.note("loss", iteration, loss.hex())
        self.seams.reach(iteration, "gradients")
        optimizer.step()
        schedule.step(increment=2 * MICRO_BATCH)

    # checkpointing.py

    def sharded(self, *, is_loading: bool = False) -> dict[str, Any]:
        (model,), optimizer, schedule = self.state
        parts = model.module.module.sharded_state_dict()
        moments = optimizer.sharded_state_dict(parts, is_loading=is_loading, metadata=KIND)
        random = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        sharded = {
            "model": parts,
            "optimizer": moments,
            "random": ShardedObject("random", random, (2,), (self.seams.rank,)),
        }
        args = self.get_args()
        common = {"iteration": args.iteration, "samples": args.consumed_train_samples}
        return sharded | common | {"schedule": schedule.state_dict()}

    def save_checkpoint(self) -> None:
        args = self.get_args()
        if self.seams.saves == "local":
            split_states = import_module("megatron.core.dist_checkpointing.tensor_aware_state_dict")
            split, _ = split_states.MCoreTensorAwareStateDict.from_state_dict(
                self.sharded(), algo="atomic", parallelization_group=dist.group.WORLD
            )
            self.local.save(split, args.iteration, is_async=False)
            self.seams.note("saved", args.iteration)
        elif self.seams.saves == "manager":
            directory = SHARED / "root" / f"iter_{args.iteration:07d}"
            if self.seams.rank == 0:
                directory.mkdir(exist_ok=True, parents=True)
            strategy = get_default_save_sharded_strategy("torch_dist")
            self.checkpointing.dist_checkpointing.save(
                self.sharded(),
                str(directory),
                strategy,
                async_sharded_save=False,
                validate_access_integrity=True,
                preprocess_common_before_consistancy_check=None,
                content_metadata=KIND,
            )
            if self.seams.rank == 0:
                TRACKER.write_text(str(args.iteration))
            self.seams.note("saved", args.iteration)
            dist.barrier()

    def load_checkpoint(self) -> None:
        found = None
        if self.seams.saves == "local":
            managers = import_module(f"{LOCAL}.ckpt_managers.local_manager")
            strategies = import_module(f"{LOCAL}.replication.strategies")
            cliques = strategies.CliqueReplicationStrategy.from_replication_params(1, 2)
            disk = SHARED / f"disk of {os.environ['SEAMS_NODE']}"
            self.local = managers.LocalCheckpointManager(str(disk), repl_strategy=cliques)
            if self.local.find_latest() != -1:
                loaded, _ = self.local.load()
                loaded.to_state_dict(None, algo="atomic", parallelization_group=None)
                found = loaded.to_state_dict(
                    self.sharded(is_loading=True),
                    algo="atomic",
                    parallelization_group=dist.group.WORLD,
                )
        elif self.seams.saves == "manager" and TRACKER.exists():
            directory = str(SHARED / "root" / f"iter_{int(TRACKER.read_text()):07d}")
            core = self.checkpointing.dist_checkpointing
            core.load_common_state_dict(directory)
            loader = get_default_load_sharded_strategy(directory)
            wanted = self.sharded(is_loading=True)
            found = core.load(wanted, directory, loader, strict="assume_ok_unexpected")
        if found is not None:
            self.take(found)

    def take(self, found: dict[str, Any]) -> None:
        (model,), optimizer, schedule = self.state
        model.module.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.num_steps = 0
        schedule.load_state_dict(found["schedule"])
        random, tracked = found["random"]
        torch.set_rng_state(random)
        get_cuda_rng_tracker().set_states(tracked)
        args = self.get_args()
        args.iteration, args.consumed_train_samples = found["iteration"], found["samples"]

    # training.py

    def note_signal(self, *_: object) -> None:
        self.is_told_to_end = True

    def is_ending(self) -> bool:
        """As ``--exit-signal-handler``: whether any rank was told to end."""
        flag = torch.tensor([float(self.is_told_to_end)])
        dist.all_reduce(flag)
        return bool(flag)

    def pretrain(self) -> None:
        if not CELL["parses_first"]:
            self.variables.set_global_variables(arguments())
        args = self.get_args()
        self.seams.join()
        parallel_state.initialize_model_parallel(
            num_distributed_optimizer_instances=2,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=LIMIT_S / 60,
        )
        model, optimizer, schedule = self.training.setup_model_and_optimizer("model")
        self.seams.note("load", args.iteration)
        while args.iteration < NUM_STEPS:
            self.training.train_step(None, model, optimizer, schedule, iteration=args.iteration)
            args.iteration += 1
            args.consumed_train_samples += 2 * MICRO_BATCH
            is_ending = self.seams.saves != "none" and self.is_ending()
            if is_ending or args.iteration % SAVE_EVERY == 0:
                self.save_checkpoint()
            if is_ending:
                sys.exit(0)
            self.seams.reach(args.iteration - 1, "end")
            time.sleep(PACE_S)
        state = MegatronStateProvider(model, optimizer)
        tensors = [tensor for part in state.parts().values() for tensor in part.values()]
        samples = {"samples": args.consumed_train_samples, "schedule": schedule.state_dict()}
        self.seams.note("final", args.iteration, digest(*tensors, torch.get_rng_state(), **samples))


def arguments() -> Namespace:
    """What Megatron-LM's parser returns."""
    samples = {
        f"{kind}_samples": 0 for kind in ("consumed_train", "consumed_valid", "skipped_train")
    }
    flops = {"num_floating_point_operations_so_far": 0}
    places = {"save": str(SHARED / "root"), "ckpt_step": None}
    return Namespace(micro_batch_size=MICRO_BATCH, iteration=0, **samples, **flops, **places)


def train(seams: Seams) -> None:
    """The script. Up to 0.16 ``pretrain`` parses the arguments, on main this."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    stand = Stand(seams)
    if seams.saves != "none":
        manager = seams.tiers() if seams.saves == "manager" else None
        megatron_lm.install(manager=manager)
        signal.signal(signal.SIGTERM, stand.note_signal)
    if CELL["parses_first"]:
        stand.variables.set_global_variables(arguments())
    pretrain = stand.pretrain
    if CELL["wraps"]:
        limits = {"max_attempts": 6, "barrier_timeout_s": BARRIER_S}
        pretrain = megatron_lm_recovery.restarting(pretrain, seams.memory, **limits)
    with cpu_stand_ins():
        pretrain()
