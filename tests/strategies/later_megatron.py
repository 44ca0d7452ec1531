"""A script: this package beside Megatron-Core as it is from 0.17, or from 0.19 on.

What stands for a later release is 0.16.1 without what that has removed (0.17: the registry and its
enum, the classes of common strategies, what strategies say of themselves; 0.19: the strategies'
base classes, with their module), and with the signatures, the wrappers and the steps of that
release's ``save`` and ``load``. In these, only strategies derived from Megatron-Core's own, and its
wrapper, are not replaced; from 0.19 on the common state is one more ShardedObject of the save, and
read from ``common.pt``, or as torch_dist.

    python later_megatron.py DIRECTORY 0.17
    python later_megatron.py DIRECTORY 0.19
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, strategies, validation
from megatron.core.dist_checkpointing import utils as megatron_utils
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies import base, fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp

IS_0_19 = sys.argv[2] == "0.19"
StrictHandling: Any = validation.StrictHandling
apply_saving_parallelization = (
    fully_parallel.FullyParallelSaveStrategyWrapper.apply_saving_parallelization
)
save_of_0_16 = torch_dist.TorchDistSaveShardedStrategy.async_save
load_of_0_16 = torch_dist.TorchDistLoadShardedStrategy.load

GONE = {
    base: (
        *("default_strategies", "register_default_strategy", "get_default_strategy"),
        *("SaveCommonStrategy", "LoadCommonStrategy"),
    ),
    validation: ("validate_sharded_objects_handling",),
    fully_parallel: ("FullyParallelSaveStrategyWrapper", "FullyParallelLoadStrategyWrapper"),
}
UNSAID = {
    *("can_handle_sharded_objects", "check_backend_compatibility", "check_version_compatibility")
}


def async_save_later(self: Any, state: Any, root: Any, async_strategy: str = "nvrx") -> Any:
    assert async_strategy in {"nvrx", "mcore"}
    return save_of_0_16(self, state, root)


def save_later(self: Any, state: Any, root: Any) -> None:
    self.async_save(state, root, async_strategy="mcore").execute_sync()


def load_later(self: Any, state: Any, root: Any, async_strategy: str = "mcore") -> Any:
    assert async_strategy == "mcore"
    return load_of_0_16(self, state, root)


def make_later() -> None:
    """Take from 0.16.1 what the later release does not have."""
    for module, names in GONE.items():
        for name in names:
            delattr(module, name)
    own = (torch_dist.TorchDistSaveShardedStrategy, torch_dist.TorchDistLoadShardedStrategy)
    for cls in {cls for strategy in own for cls in strategy.__mro__}:
        for name in UNSAID.intersection(vars(cls)):
            delattr(cls, name)
    own[0].async_save, own[0].save, own[1].load = async_save_later, save_later, load_later
    if IS_0_19:
        delattr(strategies, "base")
        vars(sys)["modules"][base.__name__] = None
    for name in ("synchronize", "current_device"):  # asked for by saves of torch_dist
        setattr(torch.cuda, name, lambda *_: "cpu")


make_later()

import dist_ckpt_strategies  # noqa: E402 - after the names have gone
from dist_ckpt_strategies.errors import StrategyError  # noqa: E402
from dist_ckpt_strategies.strategies.local_replicated import (  # noqa: E402
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.two_stage import (  # noqa: E402
    TwoStageDataParallelLoadShardedStrategy,
)
from dist_ckpt_strategies.strategies.zarr import (  # noqa: E402
    Format2LoadShardedStrategy,
    Format2SaveShardedStrategy,
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)

SAVERS = {1: ZarrSaveShardedStrategy, 2: Format2SaveShardedStrategy}
LOADERS: dict[int, Any] = {1: ZarrLoadShardedStrategy, 2: Format2LoadShardedStrategy}
State = dict[str, Any]


class FullyParallelSaveStrategyWrapper:
    """Of no class, and torch_dist unless it is told otherwise."""

    def __init__(
        self,
        strategy: Any,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,  # noqa: FBT002 - Megatron's signature
        backend: str = "torch_dist",
        version: int = 1,
    ) -> None:
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group or dist.group.WORLD
        self.do_cache_distribution = do_cache_distribution
        self.backend, self.version = backend, version
        self.cached_distribution = None

    apply_saving_parallelization = apply_saving_parallelization

    def save(self, sharded_state_dict: State, checkpoint_dir: Path) -> Any:
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.save(sharded_state_dict, checkpoint_dir)


class FullyParallelLoadStrategyWrapper:
    """What the wrapper does in a group of one rank."""

    def __init__(self, strategy: Any) -> None:
        self.base_strategy = strategy
        self.load_sharded_metadata = strategy.load_sharded_metadata

    def load(
        self, sharded_state_dict: State, checkpoint_dir: Path, async_strategy: str = "mcore"
    ) -> Any:
        return self.base_strategy.load(sharded_state_dict, checkpoint_dir, async_strategy)


def save(
    sharded_state_dict: State,
    checkpoint_dir: Path,
    sharded_strategy: Any = None,
    *,
    async_sharded_save: bool = False,
    async_strategy: str = "nvrx",
) -> Any:
    """``dist_checkpointing.save``, which replaces strategies that are not derived from its own."""
    own = (torch_dist.TorchDistSaveShardedStrategy, FullyParallelSaveStrategyWrapper)
    if not isinstance(sharded_strategy, own):
        sharded_strategy = torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1)
    checkpoint_dir.mkdir()
    sharded, common = save_preprocess(sharded_state_dict)
    marker = {
        "sharded_backend": sharded_strategy.backend,
        "sharded_backend_version": sharded_strategy.version,
    }
    if IS_0_19:
        sharded["common_state"] = ShardedObject(
            key="common_state",
            data=common,
            global_shape=(1,),
            global_offset=(0,),
            replica_id=dist.get_rank(),
        )
    else:
        torch.save(common, checkpoint_dir / "common.pt")
        marker |= {"common_backend": "torch", "common_backend_version": 1}

    def finalize() -> None:
        (checkpoint_dir / "metadata.json").write_text(json.dumps(marker))

    if not async_sharded_save:
        sharded_strategy.save(sharded, str(checkpoint_dir))
        finalize()
        return None
    request = sharded_strategy.async_save(sharded, str(checkpoint_dir), async_strategy)
    request.finalize_fns.append(finalize)
    return request


def load_common_state_dict(checkpoint_dir: str) -> Any:
    """The common state; from 0.19 on the object of torch_dist where there is no ``common.pt``."""
    path = Path(checkpoint_dir) / "common.pt"
    if not IS_0_19 or path.exists():
        return torch.load(path, map_location="cpu")
    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    wanted: State = {key: io.BytesIO()}
    load_by_dcp(wanted, storage_reader=FileSystemReader(checkpoint_dir), no_dist=True)
    found = wanted[key]
    if isinstance(found, io.BytesIO):
        found.seek(0)
        found = torch.load(found, weights_only=True)
    return found[0]


def load(
    sharded_state_dict: State,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    *,
    strict: Any = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> State:
    """``dist_checkpointing.load``, which asks a strategy for nothing but its two loads."""
    sharded_strategy = sharded_strategy or torch_dist.TorchDistLoadShardedStrategy()
    sharded, nonpersistent, factories = load_preprocess(sharded_state_dict)
    common: State = load_common_state_dict(checkpoint_dir)
    merge(common, nonpersistent)
    sharded, _ = megatron_utils.extract_sharded_base(sharded)
    strict, stored = validation.parse_strict_flag(strict), None
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        stored = sharded_strategy.load_sharded_metadata(checkpoint_dir)
        if IS_0_19:
            stored = {k: v for k, v in stored.items() if v.key != "common_state"}
    local, everyone = validation.determine_global_metadata(sharded)
    sharded, *_ = validation.validate_integrity_and_strict_load(
        sharded,
        strict,
        True,  # noqa: FBT003 - Megatron's signature
        local,
        everyone,
        stored,
    )
    merge(common, sharded_strategy.load(sharded, checkpoint_dir, "mcore"))
    return dict(apply_factory_merges(common, factories))


def state(value: float) -> State:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((5, 3), value)),
        "o": ShardedObject("o", {"t": torch.full((2,), value)} if value else None, (1,), (0,)),
    }


def saved_state() -> State:
    return state(7.0) | {"iteration": 3, "args": Namespace(tp=2)}


def is_right(loaded: Any) -> bool:
    return (
        torch.equal(loaded["w"], torch.full((5, 3), 7.0))
        and torch.equal(loaded["o"]["t"], torch.full((2,), 7.0))
        and (loaded["iteration"], loaded["args"]) == (3, Namespace(tp=2))
        and "common_state" not in loaded
    )


def is_loaded(root: Path, *loaders: Any, by_theirs: bool = True) -> bool:
    """Whether our load, and theirs with these strategies, give what was saved."""
    own: list[Any] = [
        dist_ckpt_strategies.load(state(0.0), root, loader, strict=strict)
        for loader in (None, *loaders)
        for strict in ("assume_ok_unexpected", "raise_all")
    ]
    theirs = [
        load(state(0.0), str(root), loader, strict=strict)
        for loader in loaders
        for strict in (StrictHandling.ASSUME_OK_UNEXPECTED, "raise_all")
        if by_theirs
    ]
    return all(map(is_right, own + theirs))


def has_format(root: Path, *expected: Any) -> bool:
    marker = json.loads((root / "metadata.json").read_text())
    return expected == (marker["sharded_backend"], marker["sharded_backend_version"])


def two_stage(base_strategy: Any = None) -> Any:
    return TwoStageDataParallelLoadShardedStrategy(None, base_strategy=base_strategy)


def zarr_ways(root: Path, version: int) -> dict[str, Callable[[], bool]]:
    """What a user tries with a format of ours, by name."""
    saver, loader, format_ = SAVERS[version], LOADERS[version], ("zarr", version)

    def theirs() -> bool:
        save(saved_state(), root / "a", saver())
        return has_format(root / "a", *format_) and is_loaded(root / "a", loader(), two_stage())

    def wrapped() -> bool:
        named = FullyParallelSaveStrategyWrapper(saver(), backend="zarr", version=version)
        save(saved_state(), root / "b", named)
        wrapper = FullyParallelLoadStrategyWrapper(loader())
        return has_format(root / "b", *format_) and is_loaded(root / "b", wrapper)

    def wrapped_without_a_name() -> bool:
        save(saved_state(), root / "c", FullyParallelSaveStrategyWrapper(saver()))
        return has_format(root / "c", "torch_dist", 1) and is_loaded(root / "c", loader())

    def in_the_background() -> bool:
        save(saved_state(), root / "d", saver(), async_sharded_save=True).execute_sync()
        return is_loaded(root / "d", loader())

    def ours() -> bool:
        dist_ckpt_strategies.save(saved_state(), root / "e", format_, async_strategy="nvrx")
        wrapper = FullyParallelSaveStrategyWrapper(saver())
        dist_ckpt_strategies.save(saved_state(), root / "f", wrapper)
        is_named = has_format(root / "e", *format_) and has_format(root / "f", *format_)
        return is_named and is_loaded(root / "e", loader()) and is_loaded(root / "f", loader())

    def of_earlier_releases_of_ours() -> bool:
        """They stored the object that 0.19 makes of the common state as it is."""
        common = {"iteration": 3, "args": Namespace(tp=2)}
        found = ShardedObject("common_state", common, (1,), (0,))
        saver().save(state(7.0) | {"x": found}, root / "g")
        shutil.copy(root / "e" / "metadata.json", root / "g")
        return is_loaded(root / "g", loader(), by_theirs=False)

    return {
        way.__name__: way
        for way in (
            *(theirs, wrapped, wrapped_without_a_name, in_the_background, ours),
            of_earlier_releases_of_ours,
        )
    }


def other_ways(root: Path) -> dict[str, Callable[[], bool]]:
    """The same with torch_dist, and with local checkpoints."""
    loader = torch_dist.TorchDistLoadShardedStrategy

    def torch_dist_by_ours() -> bool:
        dist_ckpt_strategies.save(saved_state(), root / "a", ("torch_dist", 1))
        wrapper = FullyParallelLoadStrategyWrapper(loader())
        return is_loaded(root / "a", loader(), wrapper, two_stage(loader()))

    def torch_dist_by_theirs() -> bool:
        save(saved_state(), root / "b")
        return is_loaded(root / "b", loader(), two_stage(loader()))

    def local() -> bool:
        saver = LocalReplicatedSaveShardedStrategy(replication_jump=1, replication_factor=1)
        save(saved_state(), root / "iter_5", saver)
        is_refused = False
        try:
            save(saved_state(), root / "iter_6", saver, async_sharded_save=True)
        except StrategyError:
            is_refused = True
        return is_refused and is_loaded(root / "iter_5", LocalReplicatedLoadShardedStrategy())

    return {way.__name__: way for way in (torch_dist_by_ours, torch_dist_by_theirs, local)}


def main(directory: Path) -> None:
    """Save and load in every way that is left."""
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    logging.basicConfig(stream=sys.stdout, format="%(message).50s", level=logging.WARNING)
    dist_ckpt_strategies.register()
    action = dist_ckpt_strategies.StrategyAction("save_sharded")
    dist_ckpt_strategies.get_default_strategy(action, "zarr", 2)
    for version in (1, 2):
        root = directory / f"zarr{version}"
        root.mkdir()
        for name, way in zarr_ways(root, version).items():
            sys.stdout.write(f"zarr {version} {name}: {way()}\n")
    for name, way in other_ways(directory).items():
        sys.stdout.write(f"{name}: {way()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
