"""Megatron-LM's training scripts with this package's checkpoints: one call before ``pretrain``.

Importing this imports nothing of Megatron-LM. What it expects there is the same in core_v0.16.1
and on the main branch.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import MissingDependencyError, StrategyError
from dist_ckpt_strategies.formats.locations import located
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.integrations.megatron_lm_resume import FirstResume, checked_load
from dist_ckpt_strategies.local import (
    CliqueReplicationStrategy,
    LocalCheckpointManager,
    MCoreTensorAwareStateDict,
)
from dist_ckpt_strategies.manager.candidates import Tier
from dist_ckpt_strategies.manager.manager import TieredCheckpointManager
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.megatron.types import (
    has_registry,
    raises_megatron_errors,
    tensor_aware_class,
)
from dist_ckpt_strategies.sharded.async_request import SaveQueue
from dist_ckpt_strategies.strategies.install import replace_functions
from dist_ckpt_strategies.strategies.load import load
from dist_ckpt_strategies.strategies.save import save

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
    check_resume: bool = True,
) -> None:
    """Make Megatron-LM save and load with this package. Rank-local; call it on every rank.

    It is ``dist_ckpt_strategies.install``, with a manager and local checkpoints. Applies to this
    process: to ``pretrain``, and to a loop of your own that calls ``save_checkpoint`` and
    ``load_checkpoint``. A later call replaces an earlier one. See docs/adopt.md for the script's
    flags.

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
        check_resume: compare the state with the global checkpoint, once the first
            ``load_checkpoint`` has put it back, and log what differs; see ``compare``. Not with
            ``--finetune``, ``--no-load-optim`` and ``--no-load-rng``.

    Raises:
        MissingDependencyError: Megatron-LM's sources are not on the path.
        IncompatibleVersionError: the format is unknown.
        StrategyError: it is torch_dist and a manager is given.
    """
    checkpointing = _checkpointing()
    is_ours = sharded_strategy[0] != _TORCH_DIST
    if manager is not None and not is_ours:
        raise StrategyError(
            "manager: expected sharded_strategy=('safetensors', 1) or ('zarr', 1) beside it, "
            "found torch_dist, which Megatron-Core writes"
        )
    chosen = options or options_from_environment()
    calls = _Calls(checkpointing, manager, chosen, allow)

    def further() -> Mapping[Any, Any]:
        theirs = getattr(checkpointing, "load_checkpoint", None)
        if theirs is None or not check_resume:
            return {}
        return {theirs: checked_load(checkpointing, calls.resume, chosen, allow)}

    replace_functions(sharded_strategy, allow, chosen, calls.save, calls.load, further)
    _provide_local(calls.local_manager)
    if is_ours and not has_registry() and find_spec("nvidia_resiliency_ext") is None:
        queues: Any = import_module("megatron.training.async_utils")  # from 0.17 on it needs that
        queues._async_calls_queue = SaveQueue()  # noqa: SLF001 - it would make one otherwise
        starts: Any = import_module("megatron.training.initialize")
        starts.init_persistent_async_worker = lambda *_, **__: None


def _checkpointing() -> Any:
    try:
        return import_module("megatron.training.checkpointing")
    except ImportError as error:
        raise MissingDependencyError(
            f"megatron.training.checkpointing: {error}; expected Megatron-LM's sources on "
            "PYTHONPATH, and what they need: the package megatron-core holds megatron.core alone, "
            "and main needs Python 3.12"
        ) from error


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


@dataclass(frozen=True, slots=True)
class _Calls:
    """What Megatron-LM calls for its checkpoints; ``manager`` has those below its root."""

    checkpointing: Any
    manager: TieredCheckpointManager | None
    options: Options
    allow: Allowed
    resume: FirstResume = field(default_factory=FirstResume)

    def local_manager(self, *a: Any, **kw: Any) -> LocalCheckpointManager:
        """The manager's, or what Megatron-LM makes; Megatron-LM searches it by itself."""
        arguments, manager = self.checkpointing.get_args(), self.manager
        if manager is not None and manager.local is not None:
            local = manager.local
            local.resumed_at(manager.course().resumed)
        else:
            made: Any = {"allow": self.allow, "timeout_s": self.options.timeout_s}
            local = LocalCheckpointManager(*a, **(made | kw))
            if root := getattr(arguments, "save", None):
                local.bind(root)
        if step := getattr(arguments, "ckpt_step", None):  # Megatron-LM would load a later one
            local.resumed_at((step, f"{time.time_ns():016x}"))
        return local

    def save(self, sharded_state_dict: StateDict, checkpoint_dir: str, **arguments: Any) -> Any:
        """This package's ``save``, by the manager where it has that place. Collective."""
        manager, step = self.manager, self._step_of(checkpoint_dir)
        if manager is None or step is None:
            return save(sharded_state_dict, checkpoint_dir, overwrite=True, **arguments)
        is_async = arguments.pop("async_sharded_save", False)
        request = manager.begin(step, sharded_state_dict, **arguments)
        if is_async:
            return request
        request.wait()
        return None

    def load(
        self,
        load_by: Callable[..., Any],
        sharded_state_dict: StateDict,
        checkpoint_dir: str,
        sharded_strategy: Any,
        **arguments: Any,
    ) -> Any:
        """Load; of the manager's checkpoints the newest one up to this. Collective.

        But with ``--ckpt-step`` just that one. Keys that ``return_*`` would return are logged:
        Megatron-LM takes the state dict alone.
        """
        if isinstance(strict := arguments.get("strict"), str):
            arguments["strict"] = strict.replace("return_", "log_")
        arguments["sharded_strategy"] = sharded_strategy
        manager = self.manager
        step = self._step_of(checkpoint_dir) if load_by is load else None
        if manager and step is not None and self.checkpointing.get_args().ckpt_step is None:
            latest = manager.load_latest(sharded_state_dict, at_most=step, **arguments)
            if latest is not None:
                self.resume.place = latest.name if latest.tier is Tier.GLOBAL else None
                return latest.state
        loaded = load_by(sharded_state_dict, checkpoint_dir, **arguments)
        self.resume.place = str(checkpoint_dir)
        return loaded

    def _step_of(self, checkpoint_dir: str) -> int | None:
        """The step, if this is where the manager has it. Rank-local."""
        manager, number = self.manager, Path(checkpoint_dir).name.removeprefix("iter_")
        if manager is None or not number.isdecimal():
            return None
        if manager.directory(int(number)) == str(located(checkpoint_dir, self.options)):
            return int(number)
        logger.warning("%s: not below the manager's root %s", checkpoint_dir, manager.root)
        return None
