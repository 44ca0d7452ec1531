"""Megatron-Bridge's way into a checkpoint, over Megatron-Core's own functions.

What stands for its training/checkpointing.py has the manager's protocol of 0.5, 0.6 and main, and
makes the calls that its save_checkpoint and load_checkpoint make.
"""

import inspect
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import MissingDependencyError, StorageError, StrategyError
from dist_ckpt_strategies.integrations.megatron_bridge import PackCheckpointManager
from tests.support.ranks import allow_torch_dist, done_by

NAME = "megatron.bridge.training.checkpointing"
CLASS = "dist_ckpt_strategies.integrations.megatron_bridge.PackCheckpointManager"
NUM_RANKS = 2


@runtime_checkable
class CheckpointManager(Protocol):
    """Bridge's protocol."""

    def __init__(self, checkpoint_config: Any) -> None: ...

    def save(self, ctx: Any, callback_manager: Any) -> None: ...

    def load(self, ctx: Any) -> tuple[int, int]: ...

    def finalize_async_saves(
        self, state: Any, *, blocking: bool = False, terminate: bool = False
    ) -> None: ...


@dataclass
class Config:
    """What is used here of Bridge's CheckpointConfig."""

    save: str
    custom_manager_class: str = CLASS
    ckpt_format: str = "torch_dist"
    async_save: bool = False
    async_strategy: str = "nvrx"
    non_persistent_ckpt_type: str | None = None
    dist_ckpt_strictness: str = "assume_ok_unexpected"


class WorkerQueue:
    """What Bridge makes at set-up: Megatron-Core's or NVRx's queue, with its worker started."""

    is_closed = False

    def get_num_unfinalized_calls(self) -> int:
        return 0

    def close(self, *, abort: bool = False) -> None:
        assert abort, "its worker has died: this waits for ever"
        self.is_closed = True


@dataclass
class GlobalState:
    """As of Bridge, whose queue is read by a property."""

    step: int = 0
    _async_calls_queue: Any = None
    async_calls_queue = property(lambda self: self._async_calls_queue)
    finalised: list[int] = field(default_factory=list)


class DefaultCheckpointManager:
    """Bridge's own manager; ``save_checkpoint`` and the like are inlined."""

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config
        self.checkpointing_context: dict[str, Any] = {}

    def save(self, ctx: Any, callback_manager: Any) -> None:
        config, state, context = self.checkpoint_config, ctx.state, self.checkpointing_context
        root = directory(config.save, state.step)
        if dist.get_rank() == 0:
            root.mkdir(parents=True, exist_ok=True)
        is_first = "save_strategy" not in context
        if is_first:
            strategy: Any = get_default_save_sharded_strategy("torch_dist")
            context["save_strategy"] = FullyParallelSaveStrategyWrapper(
                strategy, dist.group.WORLD, do_cache_distribution=True
            )
        request = sys.modules[NAME].dist_checkpointing.save(
            ctx.model,
            str(root),
            context["save_strategy"],
            async_sharded_save=config.async_save,
            async_strategy=config.async_strategy,
            validate_access_integrity=is_first,
            preprocess_common_before_consistancy_check=None,
            content_metadata={"distrib_optim_sharding_type": "dp_reshardable"},
        )

        def finalize(step: int = state.step) -> None:
            assert (root / "metadata.json").exists()
            if dist.get_rank() == 0:
                (Path(config.save) / "latest").write_text(str(step))
            dist.barrier()
            state.finalised.append(step)
            callback_manager.fire("on_checkpoint_save")

        if not config.async_save:
            assert request is None
            finalize()
            return
        request.add_finalize_fn(finalize)
        if state.async_calls_queue is not None:
            state.async_calls_queue.schedule_async_request(request)

    def load(self, ctx: Any) -> tuple[int, int]:
        config, core = self.checkpoint_config, sys.modules[NAME].dist_checkpointing
        latest = Path(config.save) / "latest"
        if not latest.exists():
            return 0, 0
        root = directory(config.save, int(latest.read_text()))
        assert core.check_is_distributed_checkpoint(str(root))
        common = core.load_common_state_dict(str(root))
        metadata = core.load_content_metadata(preloaded_state_dict=common)
        assert metadata == {"distrib_optim_sharding_type": "dp_reshardable"}
        loader: Any = get_default_load_sharded_strategy(str(root))
        loader = FullyParallelLoadStrategyWrapper(loader, dist.group.WORLD)
        self.checkpointing_context["load_strategy"] = loader
        ctx.state_dict = core.load(
            ctx.model,
            str(root),
            loader,
            strict=config.dist_ckpt_strictness,
            validate_access_integrity=True,
        )
        return ctx.state_dict["iteration"], 0

    def finalize_async_saves(
        self, state: Any, *, blocking: bool = False, terminate: bool = False
    ) -> None:
        if not self.checkpoint_config.async_save:
            return
        queue = state.async_calls_queue
        if queue is not None:
            assert queue.get_num_unfinalized_calls() >= 0
            queue.maybe_finalize_async_calls(blocking)
        if terminate and queue is not None:
            queue.close()


def create_checkpoint_manager(config: Any) -> Any:
    """As Bridge's, but for its list of allowed targets."""
    module, name = config.custom_manager_class.rsplit(".", 1)
    manager = getattr(import_module(module), name)(config)
    assert isinstance(manager, CheckpointManager)
    inspect.signature(manager.save).bind(None, None)
    return manager


def provide_bridge() -> None:
    """Have Bridge imported as the stand-in."""
    module: Any = ModuleType(NAME)
    module.dist_checkpointing = dist_checkpointing
    module.DefaultCheckpointManager = DefaultCheckpointManager
    for name in ("megatron.bridge", "megatron.bridge.training"):
        sys.modules[name] = ModuleType(name)
    sys.modules[NAME] = module


def directory(root: str, step: int) -> Path:
    return Path(root) / f"iter_{step:07d}"


def context_of(state: GlobalState, value: float) -> Any:
    """A weight that both ranks hold, one of each rank, and the common state."""
    rank = dist.get_rank()
    model = {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((8, 4), value), replica_id=rank),
        "own": ShardedTensor.from_rank_offsets("own", torch.full((2,), value + rank), (0, rank, 2)),
        "iteration": state.step,
    }
    return SimpleNamespace(state=state, model=model)


def save(manager: Any, state: GlobalState, step: int, fired: list[str]) -> None:
    """Save; what is saved is overwritten at once."""
    state.step = step
    ctx = context_of(state, float(step))
    manager.save(ctx, SimpleNamespace(fire=fired.append))
    if manager.checkpoint_config.async_save:
        for key in ("w", "own"):
            ctx.model[key].data.zero_()


def require_loaded(manager: Any, state: GlobalState, step: int) -> None:
    ctx = context_of(state, 0.0)
    assert manager.load(ctx) == (step, 0)
    assert torch.equal(ctx.state_dict["w"], torch.full((8, 4), float(step)))
    assert torch.equal(ctx.state_dict["own"], torch.full((2,), float(step + dist.get_rank())))


def train(_: int, scratch: Path) -> None:
    """In the foreground: an iteration is saved once more."""
    provide_bridge()
    manager, state = create_checkpoint_manager(Config(str(scratch))), GlobalState()
    fired: list[str] = []
    assert manager.load(context_of(state, 0.0)) == (0, 0)
    for step in (1, 2, 2):
        save(manager, state, step, fired)
    manager.finalize_async_saves(state=state, blocking=True, terminate=True)
    assert state.async_calls_queue is None
    assert (state.finalised, len(fired)) == ([1, 2, 2], 3)
    require_loaded(manager, state, 2)
    assert {"save_strategy", "load_strategy"} <= set(manager.checkpointing_context)


def train_in_the_background(rank: int, scratch: Path) -> None:
    """Two saves at a time; then one that fails on rank 1, after which training goes on."""
    provide_bridge()
    allow_torch_dist()
    manager = create_checkpoint_manager(Config(str(scratch), async_save=True))
    bridges = WorkerQueue()
    state = GlobalState(_async_calls_queue=bridges)
    fired: list[str] = []
    for step in (1, 2):
        save(manager, state, step, fired)
    assert bridges.is_closed
    while not state.finalised:  # as at each iteration
        manager.finalize_async_saves(state=state, blocking=False)
    manager.finalize_async_saves(state=state, blocking=True)
    assert state.finalised == [1, 2]
    require_loaded(manager, state, 2)

    packs = directory(str(scratch), 3) / "packs"
    dist.barrier()
    if rank == 1:
        packs.parent.mkdir(exist_ok=True)
        packs.write_text("in the way")
    dist.barrier()
    save(manager, state, 3, fired)
    with pytest.raises(StorageError, match=r"rank \d.*packs"):
        manager.finalize_async_saves(state=state, blocking=True)
    dist.barrier()
    require_loaded(manager, state, 2)

    save(manager, state, 4, fired)
    manager.finalize_async_saves(state=state, blocking=True, terminate=True)
    assert (state.finalised, len(fired)) == ([1, 2, 4], 3)
    require_loaded(manager, state, 4)


@pytest.mark.multiprocess
@pytest.mark.parametrize("body", [train, train_in_the_background])
def test_bridges_training_saves_and_loads_packs(body: Any, tmp_path: Path) -> None:
    done_by(NUM_RANKS, body, tmp_path, timeout_s=90)

    checkpoint = dist_ckpt_strategies.open(directory(str(tmp_path), 2))
    assert checkpoint["w"][:].mean() == 2.0


def test_a_format_that_bridge_saves_by_torch_dcp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="fsdp_dtensor"):
        PackCheckpointManager(Config(str(tmp_path), ckpt_format="fsdp_dtensor"))


def test_without_bridge_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)

    with pytest.raises(MissingDependencyError, match="Megatron-Bridge"):
        PackCheckpointManager(Config(str(tmp_path)))
