"""A script: this package beside Megatron-Core as it is from 0.17, 0.19 or 0.20 on.

What stands for a later release is 0.16.1 without what that has removed (0.17: the registry and its
enum, the classes of common strategies, what strategies say of themselves; 0.19: the strategies'
base classes, with their module; 0.20: the queue of asynchronous saves, and NVRx is not installed),
and with the signatures, the wrappers and the steps of that release's ``save`` and ``load``. Beside
a later release itself, nothing is replaced.

    python later_megatron.py DIRECTORY 0.17
    python later_megatron.py DIRECTORY 0.19
    python later_megatron.py DIRECTORY 0.20
"""

import hashlib
import io
import json
import logging
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import (
    ShardedObject,
    ShardedTensor,
    serialization,
    strategies,
    validation,
)
from megatron.core.dist_checkpointing import utils as megatron_utils
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp

IS_0_19, IS_0_20 = sys.argv[2] in {"0.19", "0.20"}, sys.argv[2] == "0.20"
if IS_0_20:
    vars(sys)["modules"]["nvidia_resiliency_ext"] = None
Saver, Loader = torch_dist.TorchDistSaveShardedStrategy, torch_dist.TorchDistLoadShardedStrategy
save_of_0_16, load_of_0_16 = Saver.async_save, Loader.load
State = dict[str, Any]


def async_save_later(self: Any, state: Any, root: Any, async_strategy: str = "nvrx") -> Any:
    assert async_strategy in {"nvrx", "mcore"}
    return save_of_0_16(self, state, root)


def save_later(self: Any, state: Any, root: Any) -> None:
    self.async_save(state, root, async_strategy="mcore").execute_sync()


def load_later(self: Any, state: Any, root: Any, async_strategy: str = "mcore") -> Any:
    assert async_strategy == "mcore"
    return load_of_0_16(self, state, root)


class SaveWrapper:
    """Of no class, and torch_dist by default."""

    parallelization_group: Any = None
    cached_distribution: Any = None
    do_cache_distribution = False

    def __init__(self, strategy: Any, backend: str = "torch_dist", version: int = 1) -> None:
        self.base_strategy, self.backend, self.version = strategy, backend, version

    apply_saving_parallelization = (
        fully_parallel.FullyParallelSaveStrategyWrapper.apply_saving_parallelization
    )

    def save(self, sharded_state_dict: State, checkpoint_dir: Path) -> Any:
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.save(sharded_state_dict, checkpoint_dir)


class LoadWrapper:
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
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    *,
    async_sharded_save: bool = False,
    verify_integrity: bool = False,
    **later: str,
) -> Any:
    """Replaces strategies that are not derived from its own."""
    passed = () if IS_0_20 else (later.get("async_strategy", "nvrx"),)
    if not isinstance(sharded_strategy, (Saver, SaveWrapper)):
        sharded_strategy = Saver("torch_dist", 1)
    sharded, common = save_preprocess(sharded_state_dict)
    marker = {
        "sharded_backend": sharded_strategy.backend,
        "sharded_backend_version": sharded_strategy.version,
    }
    if IS_0_19:
        sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), dist.get_rank())
    else:
        torch.save(common, Path(checkpoint_dir, "common.pt"))

    def finalize() -> None:
        Path(checkpoint_dir, "metadata.json").write_text(json.dumps(marker))
        if verify_integrity:
            serialization.save_integrity_manifest(checkpoint_dir)

    if not async_sharded_save:
        sharded_strategy.save(sharded, checkpoint_dir)
        finalize()
        return None
    request = sharded_strategy.async_save(sharded, checkpoint_dir, *passed)
    request.finalize_fns.append(finalize)
    return request


def save_integrity_manifest(checkpoint_dir: str) -> None:
    """Lists what is at the top."""
    files = {path.name: digest(path) for path in Path(checkpoint_dir).iterdir() if path.is_file()}
    manifest = {"algorithm": "sha256", "files": files}
    Path(checkpoint_dir, "integrity.json").write_text(json.dumps(manifest))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_common_state_dict(checkpoint_dir: str) -> Any:
    """From 0.19 on the object of torch_dist where there is no ``common.pt``."""
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
    verify_integrity: bool = False,
) -> State:
    """Asks a strategy for nothing but its two loads."""
    if verify_integrity:
        listed = json.loads(Path(checkpoint_dir, "integrity.json").read_text())["files"]
        for name, expected in listed.items():
            if digest(Path(checkpoint_dir, name)) != expected:
                raise CheckpointingException(name)
    sharded_strategy = sharded_strategy or Loader()
    sharded, nonpersistent, factories = load_preprocess(sharded_state_dict)
    common: State = load_common_state_dict(checkpoint_dir)
    merge(common, nonpersistent)
    sharded, _ = megatron_utils.extract_sharded_base(sharded)
    strict, stored = validation.parse_strict_flag(strict), None
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        stored = sharded_strategy.load_sharded_metadata(checkpoint_dir)
        if IS_0_19:
            stored = {k: v for k, v in stored.items() if v.key != "common_state"}
    known = validation.determine_global_metadata(sharded)
    sharded, *_ = validation.validate_integrity_and_strict_load(
        sharded,
        strict,
        True,  # noqa: FBT003 - Megatron's signature
        *known,
        stored,
    )
    passed = () if IS_0_20 else ("mcore",)
    merge(common, sharded_strategy.load(sharded, checkpoint_dir, *passed))
    return dict(apply_factory_merges(common, factories))


def make_later() -> None:
    base = strategies.base
    for name in (
        *("default_strategies", "register_default_strategy", "get_default_strategy"),
        *("SaveCommonStrategy", "LoadCommonStrategy"),
    ):
        delattr(base, name)
    del validation.validate_sharded_objects_handling
    unsaid = {"can_handle_sharded_objects"}
    unsaid |= {"check_backend_compatibility", "check_version_compatibility"}
    for cls in {*Saver.__mro__, *Loader.__mro__}:
        for name in unsaid.intersection(vars(cls)):
            delattr(cls, name)
    if IS_0_19:
        del strategies.base
        vars(sys)["modules"][base.__name__] = None
    if IS_0_20:
        vars(sys)["modules"][f"{strategies.__name__}.async_utils"] = None
    vars(serialization)["save_integrity_manifest"] = save_integrity_manifest
    Saver.async_save, Saver.save, Loader.load = async_save_later, save_later, load_later
    fully_parallel.FullyParallelSaveStrategyWrapper = SaveWrapper
    fully_parallel.FullyParallelLoadStrategyWrapper = LoadWrapper
    dist_checkpointing.save, dist_checkpointing.load = save, load


if hasattr(getattr(strategies, "base", None), "default_strategies"):
    make_later()
for asked_by_torch_dist in ("synchronize", "current_device"):
    setattr(torch.cuda, asked_by_torch_dist, lambda *_: "cpu")

import dist_ckpt_strategies  # noqa: E402 - after the names have gone
from dist_ckpt_strategies.errors import StrategyError  # noqa: E402
from dist_ckpt_strategies.megatron.types import CheckpointingException  # noqa: E402
from dist_ckpt_strategies.strategies import local_replicated, safetensors, zarr  # noqa: E402
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy  # noqa: E402

STRATEGIES: dict[tuple[str, int], tuple[Any, Any]] = {
    ("safetensors", 1): (
        safetensors.PackSaveShardedStrategy,
        safetensors.PackLoadShardedStrategy,
    ),
    ("zarr", 1): (zarr.ZarrSaveShardedStrategy, zarr.ZarrLoadShardedStrategy),
}
COMMON = {"iteration": 3, "args": Namespace(tp=2), "lr": np.float64(0.5)}
TORCH_DIST = ("torch_dist", 1)
two_stage: Any = partial(TwoStageDataParallelLoadShardedStrategy, None)


def state(value: float) -> State:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((5, 3), value)),
        "o": ShardedObject("o", {"t": torch.full((2,), value)} if value else None, (1,), (0,)),
    }


def check(
    save: Callable[..., Any], strategy: Any, root: Path, backend: tuple[str, int], *loaders: Any
) -> None:
    """The save has that format, and our load, and theirs with these strategies, give it back."""
    root.mkdir(parents=True)
    save(state(7.0) | COMMON, str(root), strategy)
    marker = json.loads((root / "metadata.json").read_text())
    assert backend == (marker["sharded_backend"], marker["sharded_backend_version"]), root
    ours, theirs = dist_ckpt_strategies.load, dist_checkpointing.load
    ways = [(ours, None), *product((ours, theirs), loaders)]
    for (way, loader), strict in product(ways, ("assume_ok_unexpected", "raise_all")):
        loaded: Any = way(state(0.0), str(root), loader, strict=strict)
        assert torch.equal(loaded.pop("w"), torch.full((5, 3), 7.0)), (root, loader)
        assert torch.equal(loaded.pop("o")["t"], torch.full((2,), 7.0)), (root, loader)
        assert loaded == COMMON, (root, loader)


def save_behind(wanted: State, root: str, strategy: Any) -> None:
    dist_checkpointing.save(wanted, root, strategy, async_sharded_save=True).execute_sync()


def save_by_megatron_lm(wanted: State, root: str, _: Any) -> None:
    """``--async-save``, from ``install`` to the next call of the training loop."""
    names = {"checkpointing", "async_utils", "initialize"}
    parts: Any = {name: ModuleType(f"megatron.training.{name}") for name in names}
    modules = vars(sys)["modules"]
    modules["megatron.training"] = ModuleType("megatron.training")
    modules.update({module.__name__: module for module in parts.values()})
    parts["checkpointing"].dist_checkpointing = dist_checkpointing
    import_module("dist_ckpt_strategies.integrations.megatron_lm").install()
    parts["initialize"].init_persistent_async_worker(0, "forkserver")
    queue = parts["async_utils"]._async_calls_queue
    core = parts["checkpointing"].dist_checkpointing
    request = core.save(wanted, root, async_sharded_save=True, validate_access_integrity=True)
    done: list[int] = []
    request.add_finalize_fn(lambda: done.append(1))
    queue.schedule_async_request(request)
    while queue.get_num_unfinalized_calls():
        queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
    queue.close()
    assert done == [1]


def check_verification(root: Path, saver: Any, loader: Any) -> None:
    """A changed byte of any file is found where both calls ask for verification.

    The digests go with the checkpoint that they are of.
    """
    root.mkdir(parents=True)
    dist_checkpointing.save(state(7.0), str(root), saver, verify_integrity=True)
    load = partial(dist_checkpointing.load, state(0.0), str(root), loader, verify_integrity=True)
    load()
    for path in [path for path in root.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        if not content:
            continue  # what a commit locks
        end = len(content) - (8 if "saves" in path.parts else 0)  # there a size follows
        path.write_bytes(content[: end - 1] + bytes([content[end - 1] ^ 1]) + content[end:])
        with pytest.raises((CheckpointingException, json.JSONDecodeError)):
            load()
        path.write_bytes(content)
    dist_ckpt_strategies.save(state(7.0), root, saver, overwrite=True)
    assert not (root / "integrity.json").exists()


def save_before_0_19(_: State, root: str, saver: Any) -> None:
    """As earlier releases of this package stored the object that is made of the common state."""
    saver.save(state(7.0) | {"x": ShardedObject("common_state", COMMON, (1,), (0,))}, root)
    marker = {"sharded_backend": saver.backend, "sharded_backend_version": saver.version}
    Path(root, "metadata.json").write_text(json.dumps(marker))


def check_installed(root: Path) -> None:
    """What stacks pass, strategies of torch_dist, saves and loads packs."""
    with dist_ckpt_strategies.installed():
        wrapper: Any = fully_parallel.FullyParallelSaveStrategyWrapper
        core, packs = dist_checkpointing, ("safetensors", 1)
        check(core.save, wrapper(Saver("torch_dist", 1)), root / "wrapped", packs)
        check(save_behind, Saver("torch_dist", 1), root / "behind", packs)
        wrapper = fully_parallel.FullyParallelLoadStrategyWrapper
        for loader in (None, Loader(), wrapper(Loader())):
            loaded = core.load(state(0.0), str(root / "behind"), loader)
            assert torch.equal(loaded["w"], torch.full((5, 3), 7.0)), loader
        assert serialization.load_tensors_metadata(str(root / "behind")).keys() == {"w"}
        root /= "of others"
        root.mkdir()
        with pytest.raises(StrategyError, match="saves its own formats in the background"):
            core.save(state(7.0), str(root), SaverOfOthers(), async_sharded_save=True)


class SaverOfOthers:
    """Megatron-Core would save torch_dist in its place."""

    backend, version = "other", 1

    def save(self, sharded_state_dict: State, checkpoint_dir: Path) -> None:
        """Save nothing."""


def check_all(directory: Path) -> None:
    """What a user tries with each format of ours, with torch_dist, and with local checkpoints."""
    ours, theirs = dist_ckpt_strategies.save, dist_checkpointing.save
    save_wrapper: Any = fully_parallel.FullyParallelSaveStrategyWrapper
    load_wrapper: Any = fully_parallel.FullyParallelLoadStrategyWrapper
    for backend, (saver, loader) in STRATEGIES.items():
        root = directory / f"{backend[0]}{backend[1]}"
        named = {"backend": backend[0], "version": backend[1]}
        check(theirs, saver(), root / "theirs", backend, loader(), two_stage())
        wrapped = save_wrapper(saver(), **named)
        check(theirs, wrapped, root / "wrapped", backend, load_wrapper(loader()))
        check(theirs, save_wrapper(saver()), root / "not named", TORCH_DIST, loader())
        check(save_behind, saver(), root / "behind", backend, loader())
        check_verification(root / "verified", saver(), loader())
        check(partial(ours, async_strategy="nvrx"), backend, root / "ours", backend, loader())
        check(ours, save_wrapper(saver()), root / "ours wrapped", backend, loader())
        if backend[0] == "zarr":  # packs had no earlier release
            check(save_before_0_19, saver(), root / "before 0.19", backend)
    root, two = directory / "torch_dist", two_stage(base_strategy=Loader())
    check(ours, TORCH_DIST, root / "ours", TORCH_DIST, Loader(), load_wrapper(Loader()), two)
    check(theirs, None, root / "theirs", TORCH_DIST, Loader(), two)
    check_installed(directory / "installed")
    if IS_0_20:
        check(save_by_megatron_lm, None, directory / "megatron_lm", ("safetensors", 1))
    local_saver: Any = local_replicated.LocalReplicatedSaveShardedStrategy
    local = local_saver(replication_jump=1, replication_factor=1)
    with pytest.raises(StrategyError):
        theirs(state(7.0), str(directory), local, async_sharded_save=True)
    loader = local_replicated.LocalReplicatedLoadShardedStrategy
    check(theirs, local, directory / "iter_5", ("local_replicated", 1), loader())


def main(directory: Path) -> None:
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    logging.basicConfig(stream=sys.stdout, format="%(message).50s", level=logging.WARNING)
    dist_ckpt_strategies.register()
    action = dist_ckpt_strategies.StrategyAction("save_sharded")
    dist_ckpt_strategies.get_default_strategy(action, "safetensors", 1)
    check_all(directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
