"""Megatron-Core's own ``save`` and ``load``, replaced for whatever calls them in this process.

verl, SkyRL, ms-swift, Megatron-Bridge, NeMo-RL, slime, miles and Megatron-LM call them through
``megatron.core.dist_checkpointing``, with its torch_dist strategies. See docs/stacks.md.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from itertools import product
from operator import call
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from dist_ckpt_strategies.comm.base import run_and_gather
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.locations import located, read_marker
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.megatron.types import (
    TORCH_DIST,
    has_registry,
    is_discarded,
    is_torch_dist,
    raises_megatron_errors,
    serialization,
)
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy
from dist_ckpt_strategies.strategies.configured import Configured
from dist_ckpt_strategies.strategies.load import load
from dist_ckpt_strategies.strategies.own_load import PACK, ZARR, OwnLoadShardedStrategy
from dist_ckpt_strategies.strategies.registry import (
    inner_strategy,
    put_back,
    register,
    registered_formats,
)
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy
from dist_ckpt_strategies.strategies.save import save
from dist_ckpt_strategies.strategies.two_stage import (
    TwoStageDataParallelLoadShardedStrategy as TwoStage,
)
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy

_UNDO = "_dist_ckpt_strategies_undo"
"""Attribute of the functions that replace others: what ``uninstall`` needs."""


@raises_megatron_errors
def install(
    *,
    sharded_strategy: tuple[str, int] = PACK,
    allow: Allowed = (),
    options: Options | None = None,
) -> None:
    """Have ``megatron.core.dist_checkpointing`` save and load by this package. Rank-local.

    Call it on every rank, before or after the stack is imported: the functions are replaced in
    every module that holds them. A later call replaces an earlier one. A save where a stack passes
    no strategy, or torch_dist, writes ``sharded_strategy``, and replaces a finished checkpoint at
    the same place. A load reads the format of the checkpoint. Fully parallel wrappers keep their
    group and their cached distribution; strategies of other packages are called as they are.

    Args:
        sharded_strategy: format of saves: ("safetensors", 1), ("zarr", 1), or ("torch_dist", 1),
            which Megatron-Core writes itself. All three are loaded in any case.
        allow: further classes that objects of a checkpoint may have.
        options: timeouts and memory bounds; by default from the environment.

    Raises:
        IncompatibleVersionError: the format is unknown.
        StrategyError: a variable of the environment is invalid, or a wrapper hides the arguments of
            a function.
    """
    replace_functions(sharded_strategy, allow, options, partial(save, overwrite=True), call)


@raises_megatron_errors
def uninstall() -> None:
    """Put Megatron-Core's functions, and its registry, back. Rank-local; undoes ``install``."""
    undo: _Undo | None = getattr(serialization.save, _UNDO, None)
    if undo is not None:
        replaced, registered = undo
        _replace_everywhere({ours: theirs for theirs, ours in replaced.items()})
        put_back(registered)


@contextmanager
def installed(**arguments: Any) -> Iterator[None]:
    """Keep ``install(**arguments)`` until the block ends, for tests. Rank-local."""
    install(**arguments)
    try:
        yield
    finally:
        uninstall()


def replace_functions(
    sharded_strategy: tuple[str, int],
    allow: Allowed,
    options: Options | None,
    save_by: Callable[..., Any],
    load_by: Callable[..., Any],
    further: Callable[[], Mapping[Any, Any]] = dict,
) -> None:
    """Install as ``install`` does, with other functions for what is of this package's formats.

    ``save_by`` is called in place of ``save``. ``load_by`` is called with ``load``, or with
    Megatron-Core's for what that loads, and with the arguments for it. ``further`` gives other
    functions that are replaced, once those of an earlier call are in place again.
    """
    chosen = options or options_from_environment()
    saver: Any = None
    if sharded_strategy != TORCH_DIST:
        kind: Any = PackSaveShardedStrategy
        if sharded_strategy[0] == ZARR[0]:
            kind = ZarrSaveShardedStrategy
        saver = kind(*sharded_strategy, options=chosen, allow=allow)
    ways = _Ways(saver, tuple(allow), chosen, save_by, load_by)
    earlier: _Undo | None = getattr(serialization.save, _UNDO, None)
    theirs_of = {ours: theirs for theirs, ours in earlier[0].items()} if earlier else {}
    replaced: dict[Any, Any] = {}
    holders = serialization, sys.modules[serialization.__package__ or ""]
    for holder, (name, ours) in product(holders, _REPLACED.items()):
        held = getattr(holder, name, None)
        theirs = theirs_of.get(held, held)
        if theirs is not None and theirs not in replaced:
            replaced[theirs] = _in_place_of(theirs, partial(ours, ways, theirs))
    uninstall()  # nothing is refused from here on
    replaced |= further()
    undo: _Undo = (replaced, registered_formats())
    for function in replaced.values():
        setattr(function, _UNDO, undo)
    if has_registry():  # there Megatron-Core looks strategies up by what a checkpoint names
        register(replace_common=True, replace=True, allow=allow, options=chosen)
    _replace_everywhere(replaced)


_Undo = tuple[Mapping[Any, Any], Any]
"""The functions that were replaced, with ours, and what was registered before."""


@dataclass(frozen=True, slots=True)
class _Ways:
    """The functions that save and load. One ``saver`` serves all saves: it has the plan cache.

    It is None where Megatron-Core saves torch_dist.
    """

    saver: Any
    allow: tuple[Any, ...]
    options: Options
    save: Callable[..., Any]
    load: Callable[..., Any]

    def loader(self, group: Any = None) -> OwnLoadShardedStrategy:
        return OwnLoadShardedStrategy(group=group, options=self.options, allow=self.allow)


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes what ``theirs`` takes, in its order, and what other releases take."""
    order = signature(theirs)
    if "checkpoint_dir" not in order.parameters:
        raise StrategyError(
            f"{theirs.__module__}.{theirs.__qualname__} stands in place of a function of Megatron-"
            "Core's and hides its arguments; put functools.wraps on it, or install before it"
        )

    @raises_megatron_errors
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(**order.bind_partial(*args).arguments, **kwargs)

    return wraps(theirs)(function)


def _replace_everywhere(changes: Mapping[Any, Any]) -> None:
    """Replace functions in every module that holds them, under whatever name."""
    by_id = {id(old): new for old, new in changes.items()}
    modules: list[Any] = list(sys.modules.values())  # some put other objects there
    for module in [module for module in modules if isinstance(module, ModuleType)]:
        names = object.__getattribute__(module, "__dict__")  # loads no lazy module
        for name, value in list(names.items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


def _save(
    ways: _Ways,
    theirs: Callable[..., Any],
    sharded_state_dict: StateDict,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    **arguments: Any,
) -> Any:
    """Megatron-Core's ``save``. Collective.

    Strategies of this package, and its formats as tuples, are taken as they are; so are strategies
    of others, by Megatron-Core where it takes them.
    """
    base, strategy = inner_strategy(sharded_strategy), sharded_strategy
    shares = getattr(strategy, "apply_saving_parallelization", None)
    is_default = _is_default(base) and (base is strategy or shares is not None)
    if is_default and ways.saver is not None:
        strategy = ways.saver
        if shares:  # a fully parallel wrapper says who saves what
            parts = {"base_strategy": ways.saver, "save": ways.saver.save}
            strategy = SimpleNamespace(**parts, apply_saving_parallelization=shares)
    elif is_default or not (isinstance(base, (Configured, tuple)) or is_discarded(strategy)):
        return theirs(sharded_state_dict, checkpoint_dir, strategy, **arguments)
    arguments |= {"sharded_strategy": strategy, "allow": ways.allow}
    return ways.save(sharded_state_dict, checkpoint_dir, **arguments)


def _is_default(strategy: Any) -> bool:
    """Whether a stack has chosen nothing but Megatron-Core's torch_dist."""
    return strategy is None or strategy == TORCH_DIST or is_torch_dist(strategy)


def _load(
    ways: _Ways,
    theirs: Callable[..., Any],
    sharded_state_dict: StateDict,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    **arguments: Any,
) -> Any:
    """Megatron-Core's ``load``, by the format that the checkpoint is in. Collective.

    In the group of a fully parallel wrapper every byte is read once, in two stages. Without
    one, or with ``process_group``, each rank reads what it needs. Strategies of other packages are
    called by Megatron-Core.
    """
    base, group = inner_strategy(sharded_strategy), arguments.get("process_group")
    if not (_is_default(base) or isinstance(base, (Configured, tuple))):
        return ways.load(theirs, sharded_state_dict, checkpoint_dir, sharded_strategy, **arguments)
    comm = open_communicator(
        group, timeout_s=ways.options.timeout_s, purpose="load", detail=f"from {checkpoint_dir}"
    )

    def read() -> list[Any]:
        return [*read_marker(located(checkpoint_dir, ways.options)).sharded_format]

    stored = tuple(run_and_gather(comm, read)[0])
    if stored == TORCH_DIST and _is_default(base):
        return ways.load(theirs, sharded_state_dict, checkpoint_dir, sharded_strategy, **arguments)
    if arguments.get("verify_integrity") and stored != PACK:
        raise StrategyError(
            f"{checkpoint_dir}: verify_integrity, in Megatron-LM --verify-integrity, needs digests,"
            f" of {PACK}, found {stored}; load without it"
        )
    strategy = sharded_strategy
    loader = ways.loader(group) if _is_default(base) or base == stored else base
    if isinstance(loader, OwnLoadShardedStrategy) and not isinstance(strategy, TwoStage):
        if arguments.pop("verify_integrity", False):
            loader = loader.with_options(verify="read")
        is_shared = group is None and hasattr(strategy, "parallelization_group")
        if is_shared:
            loader = TwoStage(strategy.parallelization_group, base_strategy=loader)
        strategy = loader
    arguments |= {"allow": ways.allow}
    return ways.load(load, sharded_state_dict, checkpoint_dir, strategy, **arguments)


def _look_up(
    ways: _Ways, theirs: Callable[..., Any], checkpoint_dir: str | Path, **arguments: Any
) -> Any:
    """Megatron-Core's functions of one directory, for formats of this package. Rank-local.

    A strategy that is passed counts for other formats only.
    """
    if read_marker(located(checkpoint_dir, ways.options)).sharded_format not in {ZARR, PACK}:
        return theirs(checkpoint_dir, **arguments)
    if theirs.__name__ == "load_common_state_dict":
        common = TorchCommonLoadStrategy(options=ways.options, allow=ways.allow)
        return common.load_common(checkpoint_dir)
    prefix = {k: v for k, v in arguments.items() if k == "key_prefix"}
    return getattr(ways.loader(), theirs.__name__)(checkpoint_dir, **prefix)


_REPLACED: Mapping[str, Callable[..., Any]] = {
    "save": _save,
    "load": _load,
    "load_common_state_dict": _look_up,
    "load_tensors_metadata": _look_up,
    "load_sharded_metadata": _look_up,
    "remove_sharded_tensors": _look_up,
}
"""Functions of ``megatron.core.dist_checkpointing.serialization``, by name, and ours for them."""
