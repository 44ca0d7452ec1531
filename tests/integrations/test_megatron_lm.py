"""Megatron-LM's way into a checkpoint, over Megatron-Core's own functions.

``megatron.training`` is in no package. What stands for its checkpointing.py makes the calls that
core_v0.16.1's makes, with the same arguments, and with those that the main branch adds.
"""

import logging
import sys
from argparse import Namespace
from functools import partial
from importlib import import_module
from itertools import product
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from dist_ckpt_strategies import ManagerOptions, SaveMetrics, SavePolicy, TieredCheckpointManager
from dist_ckpt_strategies import save as save_now
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompatibleVersionError,
    MissingDependencyError,
    StrategyError,
)
from dist_ckpt_strategies.integrations import megatron_lm
from dist_ckpt_strategies.local import LocalCheckpointManager, MCoreTensorAwareStateDict
from tests.support.checkpoints import flip_at, header_of
from tests.support.ranks import allow_torch_dist, done_by

NAME = "megatron.training.checkpointing"
NUM_RANKS = 2
STORED = {"sharded_backend": "safetensors", "sharded_backend_version": 1}


class Unknown:
    """A class that a load refuses unless it is allowed."""


def checkpointing(**arguments: Any) -> Any:
    """What is imported as Megatron-LM's checkpointing.py."""
    module: Any = ModuleType(NAME)
    module.dist_checkpointing = dist_checkpointing
    module.get_args = lambda: Namespace(ckpt_step=None, **arguments)
    sys.modules["megatron.training"] = ModuleType("megatron.training")
    sys.modules[NAME] = module
    return module


def state(value: float, *, is_wanted: bool = False) -> dict[str, Any]:
    """A weight that both ranks hold, one of each rank, an object, and the common state."""
    rank = dist.get_rank()
    found: dict[str, Any] = {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((8, 4), value), replica_id=rank),
        "own": ShardedTensor.from_rank_offsets("own", torch.full((2,), value + rank), (0, rank, 2)),
        "rng": ShardedObject("rng", None if is_wanted else Unknown(), (1,), (0,), replica_id=rank),
    }
    return found if is_wanted else found | {"iteration": int(value)}


def save_checkpoint(
    module: Any, value: float, root: Path, context: dict[str, Any], **later: Any
) -> Any:
    """As ``save_checkpoint`` calls with ``--ckpt-assume-constant-structure``."""
    is_first = "save_strategy" not in context
    if is_first:
        strategy = get_default_save_sharded_strategy("torch_dist")
        strategy.use_cached_ckpt_structure = True
        context["save_strategy"] = FullyParallelSaveStrategyWrapper(
            strategy, dist.group.WORLD, do_cache_distribution=True
        )
    if dist.get_rank() == 0:
        root.mkdir(exist_ok=True)
    return module.dist_checkpointing.save(
        state(value),
        str(root),
        context["save_strategy"],
        **{"async_sharded_save": False} | later,
        validate_access_integrity=is_first,
        preprocess_common_before_consistancy_check=None,
        content_metadata={"distrib_optim_sharding_type": "fully_reshardable"},
    )


def load_checkpoint(module: Any, root: Path, *, is_shared: bool = True, **later: Any) -> float:
    """As ``load_checkpoint`` calls: the common state, then all; the value that was saved."""
    core = module.dist_checkpointing
    assert core.check_is_distributed_checkpoint(str(root))
    common = core.load_common_state_dict(str(root))
    metadata = core.load_content_metadata(preloaded_state_dict=common)
    assert metadata == {"distrib_optim_sharding_type": "fully_reshardable"}
    loader = get_default_load_sharded_strategy(str(root))
    if is_shared:
        loader = FullyParallelLoadStrategyWrapper(loader, dist.group.WORLD)
    wanted = state(0.0, is_wanted=True)
    found = core.load(wanted, str(root), loader, **{"strict": "assume_ok_unexpected"} | later)
    value = float(found["iteration"])
    assert torch.equal(found["w"], torch.full((8, 4), value))
    assert torch.equal(found["own"], torch.full((2,), value + dist.get_rank()))
    assert isinstance(found["rng"], Unknown)
    return value


def use_global_checkpoints(rank: int, scratch: Path) -> None:
    allow_torch_dist()
    module = checkpointing()
    context: dict[str, Any] = {}
    for _ in range(2):  # a later call replaces what the first one said
        megatron_lm.install(allow=[Unknown])
    root = scratch / "iter_0000001"
    save_checkpoint(module, 1.0, root, context)
    assert load_checkpoint(module, root) == 1.0
    save_checkpoint(module, 2.0, root, context)  # the iteration once more, after a rollback
    assert load_checkpoint(module, root, is_shared=False) == 2.0

    later = scratch / "iter_0000003"
    request = save_checkpoint(
        module, 3.0, later, context, async_sharded_save=True, async_strategy="mcore"
    )
    tracked: list[bool] = []
    request.add_finalize_fn(lambda: tracked.append((later / "metadata.json").exists()))
    request.wait()
    assert tracked == [True]
    assert load_checkpoint(module, later, verify_integrity=True) == 3.0

    megatron_lm.install(sharded_strategy=("torch_dist", 1), allow=[Unknown])
    theirs = scratch / "iter_0000004"
    with cpu_stand_ins():
        save_checkpoint(module, 4.0, theirs, {})
        assert load_checkpoint(module, theirs, is_shared=False, strict="return_all") == 4.0
    assert load_checkpoint(module, later, strict="return_all") == 3.0

    damage(later, "w")
    with pytest.raises(CorruptCheckpointError, match=r"\bw: "):
        load_checkpoint(module, later, verify_integrity=True)


def use_format_1(_: int, scratch: Path) -> None:
    """Verification is refused, and keys are not returned."""
    module = checkpointing()
    megatron_lm.install(sharded_strategy=("zarr", 1), allow=[Unknown])
    one = scratch / "iter_0000005"
    with pytest.raises(StrategyError, match=r"--verify-integrity.*\('zarr', 1\)"):
        save_checkpoint(module, 5.0, one, {}, verify_integrity=True)
    save_checkpoint(module, 5.0, one, {})
    with pytest.raises(StrategyError, match=r"--verify-integrity.*\('zarr', 1\)"):
        load_checkpoint(module, one, verify_integrity=True)
    for is_shared, strict in product((False, True), ("return_all", "return_unexpected")):
        assert load_checkpoint(module, one, is_shared=is_shared, strict=strict) == 5.0


class Trained:
    """What Megatron-LM's checkpointing.py reads and sets, and calls that it makes of itself."""

    def __init__(self, module: Any, root: Path) -> None:
        self.module, self.root, self.forgets = module, root, ""
        self.weight, self.moments = torch.zeros(8, 4), torch.zeros(8, 4)
        self.random, self.num_steps = torch.zeros(4), 0
        module.get_rng_state = self.get_rng_state
        module.generate_state_dict = self.generate_state_dict
        module.load_checkpoint = self.load_checkpoint

    def get_rng_state(self, ckpt_format: str) -> Any:
        return ShardedObject("rng", self.random, (2,), (dist.get_rank(),))

    def generate_state_dict(
        self, args: Any, rng_state: Any, iteration: Any = None, optim_sd_kwargs: Any = None
    ) -> dict[str, Any]:
        is_loading = (optim_sd_kwargs or {}).get("is_loading", False)
        moments = torch.empty(8, 4) if is_loading else self.moments  # loaded by copy
        rows = {"w": self.weight, "optimizer.state.exp_avg.w": moments}
        where = (0, dist.get_rank(), 2)
        shards = {key: ShardedTensor.from_rank_offsets(key, t, where) for key, t in rows.items()}
        common = {"args": args, "opt_param_scheduler": {"num_steps": self.num_steps}}
        return {**common, "shards": shards, "rng_state": rng_state}

    def load_checkpoint(self, load_arg: str = "load") -> int:
        args, rng = Namespace(load=load_arg), self.module.get_rng_state("torch_dist")
        kwargs = {"is_loading": True, "metadata": {}}
        wanted = self.module.generate_state_dict(args, rng_state=rng, optim_sd_kwargs=kwargs)
        found = self.module.dist_checkpointing.load(wanted, str(self.root))
        if self.forgets != "optimizer":
            self.moments = found["shards"]["optimizer.state.exp_avg.w"].clone()
        if self.forgets != "scheduler":
            self.num_steps = found["opt_param_scheduler"]["num_steps"]
        if self.forgets != "random" or dist.get_rank() == 0:
            self.random = found["rng_state"]
        return int(found["iteration"])


def check_the_first_resume(rank: int, scratch: Path) -> None:
    root = scratch / "iter_0000009"
    logger = logging.getLogger("dist_ckpt_strategies.integrations.megatron_lm_resume")
    logger.setLevel(logging.INFO)
    lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger.addHandler(QueueHandler(lines))
    module = checkpointing()
    saved = Trained(module, root)
    saved.weight, saved.moments = torch.full((8, 4), 2.0), torch.full((8, 4), 3.0 + rank)
    saved.random, saved.num_steps = torch.arange(4.0), 9
    state = saved.generate_state_dict(Namespace(load="none"), saved.get_rng_state(""))
    save_now(state | {"iteration": 9}, root)
    for forgets in ("", "optimizer", "scheduler", "random", "unchecked"):
        trained = Trained(module, root)
        trained.forgets = forgets
        makers = module.get_rng_state, module.generate_state_dict
        megatron_lm.install(check_resume=forgets != "unchecked")
        for _ in range(2):
            assert module.load_checkpoint() == 9
        assert (module.get_rng_state, module.generate_state_dict) == makers
        found = [lines.get() for _ in range(lines.qsize())]
        if rank or forgets == "unchecked":
            continue
        (record,) = found  # of the first load alone
        levels = logging.WARNING if forgets else logging.INFO
        assert record.levelno == levels, record.getMessage()
        key = {
            "": "the state is that of",
            "optimizer": "  optimizer.state.exp_avg.w: 64 elements differ",
            "scheduler": "  common.pt['opt_param_scheduler']['num_steps']: 9 in the checkpoint, 0",
            "random": "  rng/shard_1_2: ",
        }[forgets]
        assert key in record.getMessage(), record.getMessage()
        assert record.getMessage().count("\n") == bool(forgets), record.getMessage()


@pytest.mark.multiprocess
def test_the_first_resume_is_compared_with_its_checkpoint(tmp_path: Path) -> None:
    done_by(NUM_RANKS, check_the_first_resume, tmp_path)


def damage(root: Path, key: str) -> None:
    """Change a byte of each block of an array. Collective: world."""
    dist.barrier()
    for pack in root.glob("packs/*/*") if dist.get_rank() == 0 else ():
        fields, start = header_of(pack)
        for name in (name for name in fields if name.startswith(f"{key}@")):
            flip_at(pack, start + fields[name]["data_offsets"][0])
    dist.barrier()


@pytest.mark.multiprocess
def test_the_calls_of_megatron_lm_save_and_load_by_this_package(tmp_path: Path) -> None:
    done_by(NUM_RANKS, use_global_checkpoints, tmp_path)
    done_by(NUM_RANKS, use_format_1, tmp_path)

    text = (tmp_path / "iter_0000001" / "metadata.json").read_text()
    assert all(f'"{key}": {value!r}'.replace("'", '"') in text for key, value in STORED.items())


def use_manager(rank: int, scratch: Path) -> None:
    module = checkpointing()
    metrics: list[SaveMetrics] = []
    options = ManagerOptions(timeout_s=60, metrics=metrics.append)
    policy = SavePolicy(keep_last=2)
    manager = TieredCheckpointManager(scratch / "run", policy=policy, options=options)
    megatron_lm.install(allow=[Unknown], manager=manager)
    context: dict[str, Any] = {}
    requests: list[Any] = []
    tracked: list[int] = []
    (scratch / "run").mkdir(exist_ok=True)
    for step in (1, 2, 3):  # the first one synchronous
        directory = scratch / "run" / f"iter_{step:07d}"
        how = {"async_sharded_save": step > 1}
        if request := save_checkpoint(module, float(step), directory, context, **how):
            request.add_finalize_fn(partial(tracked.append, step))
            requests.append(request)
    for request in requests:  # as a queue does; of the first the manager has seen the end
        request.work.ends_within(60)
        for finalize in request.finalize_fns:
            finalize()
    manager.release()  # as at the end of the process; what is old has been removed
    damage(directory, "own")
    assert load_checkpoint(module, directory) == 2.0
    module.get_args = lambda: Namespace(ckpt_step=3)
    with pytest.raises(CorruptCheckpointError):  # it was asked for by name
        load_checkpoint(module, directory)
    manager.close()
    assert (manager.all_steps(), tracked) == ([2, 3], [2, 3])
    events = [(one.kind, one.step) for one in metrics]
    assert events == ([*(("save", step) for step in (1, 2, 3)), ("load", 2)] if rank == 0 else [])


@pytest.mark.multiprocess
def test_a_manager_takes_the_checkpoints_of_megatron_lm(tmp_path: Path) -> None:
    done_by(NUM_RANKS, use_manager, tmp_path, timeout_s=90)


def find_as_other_trainings(module: Any, scratch: Path) -> None:
    """Only with the same ``--save`` the local checkpoints are found, up to ``--ckpt-step``."""
    managers = import_module(
        "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"
    )
    for save, step, newest in (
        *(("other", None, -1), (None, None, -1)),
        *(("global", None, 4), ("global", 4, 4), ("global", 3, -1)),
    ):
        known = {"save": save and str(scratch / save), "ckpt_step": step}
        module.get_args = lambda known=known: Namespace(**known)
        assert managers.LocalCheckpointManager(str(scratch / "local")).find_latest() == newest


def use_local_checkpoints(rank: int, scratch: Path, own: bool) -> None:
    """As ``pretrain``, ``save_checkpoint`` and ``load_checkpoint`` go, without NVRx."""
    module = checkpointing(save=str(scratch / "global"))
    sys.modules["nvidia_resiliency_ext"] = None  # type: ignore[assignment]
    kept = LocalCheckpointManager(scratch / "kept", keep=2, allow=[Unknown])
    policy = SavePolicy(local_every_steps=2)
    tiered = TieredCheckpointManager(scratch / "global", local=kept, policy=policy)
    megatron_lm.install(allow=[Unknown], manager=tiered if own else None)

    # Whatever Megatron-LM imports is there.
    nvrx = "nvidia_resiliency_ext.checkpointing.local"
    managers = import_module(f"{nvrx}.ckpt_managers.local_manager")
    strategies = import_module(f"{nvrx}.replication.strategies")
    from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import (  # noqa: F401, PLC0415
        GroupWrapper,
        parse_group_sequence,
    )

    strategy = strategies.CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = managers.LocalCheckpointManager(str(scratch / "local"), repl_strategy=strategy)
    assert (manager is kept) == own
    assert manager.find_latest() == -1

    split_states = import_module("megatron.core.dist_checkpointing.tensor_aware_state_dict")
    cached = None
    for iteration in (2, 4):
        split, cached = split_states.MCoreTensorAwareStateDict.from_state_dict(
            state(float(iteration)),
            algo="fully_parallel",
            cached_metadata=cached,
            parallelization_group=dist.group.WORLD,
        )
        assert isinstance(split, MCoreTensorAwareStateDict)
        request = manager.save(split, iteration, is_async=True)
        request.wait()
    assert str(manager.local_ckpt_dir).endswith(str(rank))
    assert manager.find_latest() == 4
    loaded, _ = manager.load()
    common = loaded.to_state_dict(None, algo="fully_parallel", parallelization_group=None)
    found = loaded.to_state_dict(
        state(0.0, is_wanted=True), algo="fully_parallel", parallelization_group=dist.group.WORLD
    )
    assert common["iteration"] == 4
    assert (found["w"][0, 0], found["own"].tolist()) == (4.0, [4.0 + rank] * 2)
    if not own:
        find_as_other_trainings(module, scratch)


@pytest.mark.multiprocess
@pytest.mark.parametrize("own", [False, True])
def test_local_checkpoints_go_through_this_package_without_nvrx(tmp_path: Path, own: bool) -> None:
    done_by(NUM_RANKS, use_local_checkpoints, tmp_path, own)

    assert (tmp_path / "local").exists() != own


def test_without_megatron_lm_the_sources_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training", None)

    with pytest.raises(MissingDependencyError, match="PYTHONPATH"):
        megatron_lm.install()


def test_an_unknown_format_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))
    theirs = dist_checkpointing.save, dist_checkpointing.load

    with pytest.raises(IncompatibleVersionError, match=r"zarr.*3"):
        megatron_lm.install(sharded_strategy=("zarr", 3))

    assert (dist_checkpointing.save, dist_checkpointing.load) == theirs
