"""One installer for every stack. What stands for the stacks calls Megatron-Core as they do."""

import functools
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, serialization
from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.config import install_from_environment
from dist_ckpt_strategies.errors import IncompatibleVersionError, StrategyError
from tests.support.ranks import allow_torch_dist, done_by

NUM_RANKS = 2
PACKS, ZARR, TORCH_DIST = ("safetensors", 1), ("zarr", 1), ("torch_dist", 1)


class Unknown:
    """A class that a load refuses unless it is allowed."""


def state(value: float) -> dict[str, Any]:
    """A weight that both ranks hold, one of each rank, an object, and the common state."""
    rank = dist.get_rank()
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((8, 4), value), replica_id=rank),
        "own": ShardedTensor.from_rank_offsets("own", torch.full((2,), value + rank), (0, rank, 2)),
        "rng": ShardedObject("rng", value, (1,), (0,), replica_id=rank),
        "iteration": int(value),
    }


def require_loaded(loaded: dict[str, Any], value: float) -> None:
    assert torch.equal(loaded["w"], torch.full((8, 4), value))
    assert torch.equal(loaded["own"], torch.full((2,), value + dist.get_rank()))
    assert (loaded["rng"], loaded["iteration"]) == (value, int(value))


def a_stack() -> Any:
    """A stack that is imported before the installation, and has names of its own."""
    module: Any = ModuleType("a_stack")
    module.dist_checkpointing = dist_checkpointing
    module.save_by_name, module.load_by_name = serialization.save, dist_checkpointing.load
    sys.modules[module.__name__] = module
    return module


def made(root: Path) -> str:
    """The directory, as stacks make it."""
    root.mkdir(exist_ok=True)
    return str(root)


def as_verl(stack: Any, root: Path, *, is_async: bool = False) -> None:
    """verl and SkyRL: by keywords, in wrappers around what Megatron-Core looks up."""
    group = dist.group.WORLD
    save: Any = serialization.get_default_save_sharded_strategy("torch_dist")
    request = stack.dist_checkpointing.save(
        sharded_state_dict=state(1.0),
        checkpoint_dir=made(root),
        sharded_strategy=FullyParallelSaveStrategyWrapper(save, group),
        async_sharded_save=is_async,
        async_strategy="mcore",
        validate_access_integrity=True,
    )
    if is_async:
        queue = AsyncCallsQueue()
        with cpu_stand_ins():
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
    load: Any = serialization.get_default_load_sharded_strategy(str(root))
    loaded = stack.dist_checkpointing.load(
        state(0.0), str(root), sharded_strategy=FullyParallelLoadStrategyWrapper(load, group)
    )
    require_loaded(loaded, 1.0)


def as_bridge(stack: Any, root: Path, context: dict[str, Any], value: float) -> None:
    """Megatron-Bridge, NeMo-RL and ms-swift: by position, with strategies that they make."""
    if "save" not in context:
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2)
        context["save"] = FullyParallelSaveStrategyWrapper(
            strategy, dist.group.WORLD, do_cache_distribution=True
        )
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    request = stack.dist_checkpointing.save(
        state(value),
        made(root),
        context["save"],
        async_sharded_save=True,
        validate_access_integrity=True,
        preprocess_common_before_consistancy_check=dict,
        content_metadata=metadata,
    )
    ends: list[bool] = []
    request.add_finalize_fn(lambda: ends.append((root / "metadata.json").exists()))
    request.execute_sync()
    assert ends == [True]
    common = stack.dist_checkpointing.load_common_state_dict(str(root))
    core = stack.dist_checkpointing
    assert core.load_content_metadata(preloaded_state_dict=common) == metadata
    for loader in (TorchDistLoadShardedStrategy(), None):
        loaded = core.load(state(0.0), str(root), loader, strict="log_all")
        require_loaded(loaded, value)
    assert core.load_tensors_metadata(str(root), loader).keys() == {"w", "own"}
    assert torch.equal(core.load_plain_tensors(str(root))["w"], torch.full((8, 4), value))


class OfOthers:
    """A strategy of another package, which counts its saves."""

    backend, version, can_handle_sharded_objects = "others", 1, True
    saves = 0

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> None:
        self.saves += 1


class SaverOfOthers(OfOthers, base.SaveShardedStrategy):  # type: ignore[misc]
    """The same, as Megatron-Core asks for it."""


def held() -> list[Any]:
    """Functions and strategies that an installation changes."""
    names = ("save", "load", "load_common_state_dict", "load_tensors_metadata")
    modules = (dist_checkpointing, serialization)
    functions = [getattr(module, name) for module in modules for name in names]
    strategies = {  # Megatron-Core's for torch_dist are new ones at each look-up
        (action, key): strategy
        for action, known in base.default_strategies.items()
        for key, strategy in known.items()
        if key != TORCH_DIST
    }
    return [*functions, strategies]


def use_all_stacks(_: int, scratch: Path) -> None:
    allow_torch_dist()
    stack, before = a_stack(), held()
    with cpu_stand_ins():
        stack.save_by_name(state(5.0), made(scratch / "earlier"))
    for _ in range(2):
        dist_ckpt_strategies.install()
    as_verl(stack, scratch / "verl")
    as_verl(stack, scratch / "SkyRL", is_async=True)
    context: dict[str, Any] = {}
    for value in (2.0, 3.0):
        as_bridge(stack, scratch / "Bridge", context, value)
    assert context["save"].cached_distribution is not None

    stack.save_by_name(state(4.0), made(scratch / "by name"))
    require_loaded(stack.load_by_name(state(0.0), str(scratch / "by name")), 4.0)
    stack.save_by_name(state(4.0), made(scratch / "a tuple"), ZARR)
    require_loaded(stack.load_by_name(state(0.0), str(scratch / "a tuple")), 4.0)
    with cpu_stand_ins():
        require_loaded(stack.load_by_name(state(0.0), str(scratch / "earlier")), 5.0)
    saver = SaverOfOthers("others", 1)
    stack.save_by_name(state(4.0), made(scratch / "of others"), saver)
    assert saver.saves == 1
    with pytest.raises(StrategyError, match="async_strategy"):
        stack.save_by_name(state(4.0), made(scratch / "refused"), async_strategy="other")
    with pytest.raises(TypeError, match="positional"):
        stack.save_by_name(*range(20))

    dist_ckpt_strategies.uninstall()
    assert held() == before
    assert (stack.save_by_name, stack.load_by_name) == (before[0], before[1])
    with cpu_stand_ins():
        stack.save_by_name(state(6.0), made(scratch / "later"))


def marker(root: Path) -> tuple[str, int]:
    found = dist_checkpointing.core.maybe_load_config(str(root))
    return found.sharded_backend, found.sharded_backend_version


@pytest.mark.multiprocess
def test_stacks_save_packs_and_load_every_format(tmp_path: Path) -> None:
    done_by(NUM_RANKS, use_all_stacks, tmp_path)

    packs = dict.fromkeys(("verl", "SkyRL", "Bridge", "by name"), PACKS)
    others = {"a tuple": ZARR, "of others": ("others", 1)}
    before_and_after = dict.fromkeys(("earlier", "later"), TORCH_DIST)
    expected = packs | others | before_and_after
    assert {name: marker(tmp_path / name) for name in expected} == expected


def import_auto(_: int, scratch: Path) -> None:
    allowed = f"{Unknown.__module__}:{Unknown.__name__}"
    os.environ.update(DIST_CKPT_FORMAT="zarr", DIST_CKPT_ALLOW=allowed)
    import_module("dist_ckpt_strategies.integrations.auto").hook("arguments of a stack")
    wanted = {"rng": ShardedObject("rng", Unknown(), (1,), (0,), replica_id=dist.get_rank())}
    dist_checkpointing.save(wanted, made(scratch / "auto"))
    loaded = dist_checkpointing.load(wanted, str(scratch / "auto"))
    assert isinstance(loaded["rng"], Unknown)


@pytest.mark.multiprocess
def test_a_module_to_import_installs_with_options_of_the_environment(tmp_path: Path) -> None:
    done_by(NUM_RANKS, import_auto, tmp_path)

    assert marker(tmp_path / "auto") == ZARR


def test_a_wrapper_that_hides_the_arguments_is_refused_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = serialization.save

    def traced(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(serialization, "save", traced)
    with pytest.raises(StrategyError, match=r"traced .*functools\.wraps"):
        dist_ckpt_strategies.install()
    assert serialization.save is traced
    monkeypatch.setattr(serialization, "save", functools.wraps(original)(traced))
    with dist_ckpt_strategies.installed():
        assert serialization.save is not traced
    assert serialization.save is traced


def test_a_refused_installation_leaves_the_earlier_one_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = held()
    with dist_ckpt_strategies.installed(sharded_strategy=ZARR):
        with monkeypatch.context() as hiding:
            hiding.setattr(dist_checkpointing, "load", lambda *_, **__: None)
            earlier = held()
            with pytest.raises(StrategyError, match=r"functools\.wraps"):
                dist_ckpt_strategies.install()
            with pytest.raises(IncompatibleVersionError, match="hdf5"):
                dist_ckpt_strategies.install(sharded_strategy=("hdf5", 1))
            assert held() == earlier
        dist_ckpt_strategies.install()  # in place of the earlier one, not around it
    assert held() == before


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DIST_CKPT_ALLOW", "pathlib:Path, no.such:Class", "package.module:Class.*no.such"),
        ("DIST_CKPT_FORMAT", "hdf5", "safetensors, zarr, torch_dist.*hdf5"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(StrategyError, match=f"{name}.*{expected}"):
        install_from_environment()
