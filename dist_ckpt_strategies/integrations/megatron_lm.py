"""Megatron-LM's training scripts with this package's checkpoints: one call before ``pretrain``.

Importing this imports nothing of Megatron-LM. What it expects there is the same in core_v0.16.1
and on the main branch.
"""

import logging
import sys
import time
from dataclasses import astuple
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from dist_ckpt_strategies.comm.base import run_and_gather
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import MissingDependencyError, StrategyError
from dist_ckpt_strategies.formats.locations import PACKS, located, read_marker
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.local import (
    CliqueReplicationStrategy,
    LocalCheckpointManager,
    MCoreTensorAwareStateDict,
)
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.megatron.types import (
    has_registry,
    raises_megatron_errors,
    tensor_aware_class,
)
from dist_ckpt_strategies.sharded.async_request import SaveQueue
from dist_ckpt_strategies.strategies.load import load
from dist_ckpt_strategies.strategies.registry import register
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy
from dist_ckpt_strategies.strategies.save import save
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import (
    EitherFormatLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)
from dist_ckpt_strategies.tiered import TieredCheckpointManager

__all__ = ["install"]

logger = logging.getLogger(__name__)

_TORCH_DIST = "torch_dist"
_NVRX = "nvidia_resiliency_ext.checkpointing.local"


@raises_megatron_errors
def install(
    *,
    sharded_strategy: tuple[str, int] = ("safetensors", 1),
    allow: Allowed = (),
    options: Options | None = None,
    manager: TieredCheckpointManager | None = None,
) -> None:
    """Make Megatron-LM save and load with this package. Rank-local; call it on every rank.

    Applies to this process: to ``pretrain``, and to a loop of your own that calls
    ``save_checkpoint`` and ``load_checkpoint``. A later call replaces an earlier one. See
    docs/adopt.md for the script's flags.

    Args:
        sharded_strategy: format of global checkpoints: ("safetensors", 1), ("zarr", 1), or
            ("torch_dist", 1), which Megatron-Core writes itself. All three are loaded in any case.
        allow: further classes that objects of a checkpoint may have.
        options: timeouts and memory bounds; by default from the environment.
        manager: manages the checkpoints below its ``root``, the directory of ``--save`` and
            ``--load``: locks it against other jobs, loads an older checkpoint if the newest is
            damaged, reports metrics and removes old ones. The flags decide when to save, and
            ``--exit-signal-handler`` handles SIGTERM. Its ``local`` is used by
            ``--non-persistent-ckpt-type local``.

    Raises:
        MissingDependencyError: Megatron-LM's sources are not on the path.
        StrategyError: this release of Megatron-LM is not supported; or the format is unknown, or
            is torch_dist and a manager is given.
    """
    try:
        checkpointing: Any = import_module("megatron.training.checkpointing")
    except ImportError as error:
        raise MissingDependencyError(
            f"megatron.training.checkpointing: {error}; expected Megatron-LM's sources on "
            "PYTHONPATH, and what they need: the package megatron-core holds megatron.core alone, "
            "and main needs Python 3.12"
        ) from error
    found = getattr(checkpointing, "dist_checkpointing", None)
    if found is None:
        raise StrategyError(
            f"{checkpointing.__file__}: expected the name dist_checkpointing, by which it saves "
            "and loads in core_v0.16.1 and on main; with this release call "
            "dist_ckpt_strategies.register and follow docs/adopt.md"
        )
    theirs = found.theirs if isinstance(found, _Checkpointing) else found
    chosen = options or options_from_environment()
    ours = _Checkpointing(checkpointing, theirs, sharded_strategy, tuple(allow), chosen, manager)
    if has_registry():  # there Megatron-Core looks up who reads the common state
        register(replace_common=True, replace=True, allow=allow, options=chosen)
    made = {"allow": allow, "timeout_s": chosen.timeout_s}
    _provide_local(partial(_local_manager, checkpointing, manager, made))
    is_ours = sharded_strategy[0] != _TORCH_DIST
    if is_ours and not has_registry() and find_spec("nvidia_resiliency_ext") is None:
        queues: Any = import_module("megatron.training.async_utils")  # from 0.17 on it needs that
        queues._async_calls_queue = SaveQueue()  # noqa: SLF001 - it would make one otherwise
        starts: Any = import_module("megatron.training.initialize")
        starts.init_persistent_async_worker = lambda *_, **__: None
    checkpointing.dist_checkpointing = ours


def _local_manager(
    checkpointing: Any, manager: TieredCheckpointManager | None, made: Any, *a: Any, **kw: Any
) -> LocalCheckpointManager:
    """The manager's, or what Megatron-LM makes; Megatron-LM searches it by itself."""
    arguments, local = checkpointing.get_args(), manager.local if manager else None
    if manager is not None and local is not None:
        local.resumed_at(manager.course().resumed)
    else:
        local = LocalCheckpointManager(*a, **(made | kw))
        if root := getattr(arguments, "save", None):
            local.bind(root)
    if step := getattr(arguments, "ckpt_step", None):  # Megatron-LM would load a later one
        local.resumed_at((step, f"{time.time_ns():016x}"))
    return local


def _provide_local(make: Any) -> None:
    """Have ``--non-persistent-ckpt-type local`` save and load by a manager that ``make`` returns.

    Megatron-LM takes its local checkpoints from nvidia-resiliency-ext, by imports within
    ``pretrain``. They find this package's classes then, whether that one is installed or not.
    """
    _provide("ckpt_managers.local_manager", LocalCheckpointManager=make)
    _provide("replication.strategies", CliqueReplicationStrategy=CliqueReplicationStrategy)
    _provide("replication.group_utils")
    tensor_aware_class().from_state_dict = MCoreTensorAwareStateDict.from_state_dict


def _provide(name: str, **values: Any) -> None:
    """Give names of a module of nvidia-resiliency-ext other values; make it where it is missing."""
    path = f"{_NVRX}.{name}"
    try:
        module = import_module(path)
    except ImportError:
        # Found by its whole name; the package above it stays missing for those who look for it.
        module = sys.modules[path] = _Missing(path)
    for key, value in values.items():
        setattr(module, key, value)


class _Missing(ModuleType):
    """A module of which Megatron-LM imports more names than it uses."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Checkpointing:
    """``megatron.core.dist_checkpointing``, as Megatron-LM's checkpointing.py sees it.

    Megatron-LM calls with the strategies of its flags. The groups in which work is shared are
    taken from these, and what is to be cached; who writes and reads is decided here. The
    module is ``theirs``: all but ``save`` and ``load`` is its own.
    """

    def __init__(
        self,
        checkpointing: Any,
        theirs: Any,
        sharded_strategy: tuple[str, int],
        allow: Allowed,
        options: Options,
        manager: TieredCheckpointManager | None,
    ) -> None:
        self.theirs = theirs
        self._saver: Any = None  # one for all saves: it keeps what ranks know of each other
        if sharded_strategy[0] != _TORCH_DIST:
            is_zarr = sharded_strategy[0] == "zarr"
            kind: Any = ZarrSaveShardedStrategy if is_zarr else PackSaveShardedStrategy
            self._saver = kind(*sharded_strategy, options=options, allow=allow)
        elif manager is not None:
            raise StrategyError(
                "manager: expected sharded_strategy=('safetensors', 1) or ('zarr', 1) beside it, "
                "found torch_dist, which Megatron-Core writes"
            )
        self._allow = allow
        self._options = options
        self._manager, self._checkpointing = manager, checkpointing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)

    def save(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str,
        sharded_strategy: Any = None,
        **arguments: Any,
    ) -> Any:
        """Megatron-Core's ``save``; a finished checkpoint at the same place is replaced as there.

        Collective. ``--ckpt-fully-parallel-save`` comes as a wrapper: it keeps its group and, for
        ``--ckpt-assume-constant-structure``, who writes what, and writes by this package.
        ``--verify-integrity`` raises a StrategyError where the format keeps no digests.
        """
        saver: Any = self._saver
        if saver is None:
            return self.theirs.save(
                sharded_state_dict, checkpoint_dir, sharded_strategy, **arguments
            )
        if hasattr(sharded_strategy, "base_strategy"):
            wrapper = sharded_strategy
            wrapper.base_strategy = saver
            wrapper.backend, wrapper.version = saver.backend, saver.version
            saver = wrapper
        arguments |= {"sharded_strategy": saver, "allow": self._allow}
        step = self._step_of(checkpoint_dir)
        if self._manager is None or step is None:
            return save(sharded_state_dict, checkpoint_dir, overwrite=True, **arguments)
        is_async = arguments.pop("async_sharded_save", False)
        request = self._manager.begin(step, sharded_state_dict, **arguments)
        if is_async:
            return request
        request.wait()
        return None

    def _step_of(self, checkpoint_dir: str) -> int | None:
        """The step, if this is where the manager has it. Rank-local."""
        number = Path(checkpoint_dir).name.removeprefix("iter_")
        if self._manager is None or not number.isdecimal():
            return None
        if self._manager.directory(int(number)) == str(located(checkpoint_dir, self._options)):
            return int(number)
        logger.warning("%s: not below the manager's root %s", checkpoint_dir, self._manager.root)
        return None

    def load(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str,
        sharded_strategy: Any = None,
        **arguments: Any,
    ) -> Any:
        """Megatron-Core's ``load``, by the format that the checkpoint is in.

        Collective. ``--ckpt-fully-parallel-load`` comes as a wrapper: in its group every byte is
        read once, in two stages. ``--verify-integrity`` has digests of all that is read compared,
        or raises a StrategyError where the format keeps none. Keys that ``return_*`` would return
        are logged: Megatron-LM takes the state dict alone.
        """
        if isinstance(strict := arguments.get("strict"), str):
            arguments["strict"] = strict.replace("return_", "log_")
        comm = open_communicator(
            None,
            timeout_s=self._options.timeout_s,
            purpose="load",
            detail=f"from {checkpoint_dir}",
        )
        place = located(checkpoint_dir, self._options)
        backend, version = run_and_gather(comm, lambda: [*astuple(read_marker(place))[:2]])[0]
        if backend == _TORCH_DIST:
            return self.theirs.load(
                sharded_state_dict, checkpoint_dir, sharded_strategy, **arguments
            )
        verify = "read" if arguments.pop("verify_integrity", False) else None
        if verify and (backend, version) != PACKS.sharded_format:
            raise StrategyError(
                f"{checkpoint_dir}: --verify-integrity needs digests, of ('safetensors', 1), found "
                f"{(backend, version)}; load without it"
            )
        loader: Any = EitherFormatLoadShardedStrategy(
            verify=verify, options=self._options, allow=self._allow
        )
        if hasattr(sharded_strategy, "base_strategy"):
            loader = TwoStageDataParallelLoadShardedStrategy(
                sharded_strategy.parallelization_group, base_strategy=loader
            )
        step = self._step_of(checkpoint_dir)
        arguments |= {"sharded_strategy": loader, "allow": self._allow}
        if (
            self._manager is not None
            and step is not None
            and self._checkpointing.get_args().ckpt_step is None
        ):
            found = self._manager.load_latest(sharded_state_dict, at_most=step, **arguments)
            if found is not None:
                return found.state
        return load(sharded_state_dict, checkpoint_dir, **arguments)
