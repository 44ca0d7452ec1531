"""Compare Megatron-LM's state with the checkpoint that it has loaded, once it has taken it over.

The state is made by Megatron-LM's own function, with the arguments that it gave to it for the load.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any

from dist_ckpt_strategies.comm.process_group import global_rank
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import CheckpointError, PeerLostError, PeerTimeoutError
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.strategies.compare import compare

logger = logging.getLogger(__name__)

_IGNORED = ("args", "iteration", "num_floating_point_operations_so_far", "rerun_state_machine*")
"""Keys that differ, or are not restored, in a correct resume."""

_PARTIAL = ("finetune", "no_load_optim", "no_load_rng")
"""Flags with which a resume is not meant to take over everything."""

_MAKERS = ("generate_state_dict", "get_rng_state")


@dataclass(slots=True)
class FirstResume:
    """The checkpoint that was loaded, until it has been compared once.

    Attributes:
        place: of the global checkpoint that was loaded last; None: there was none.
        is_over: whether the first load of the job has ended.
    """

    place: str | None = None
    is_over: bool = False


def checked_load(
    checkpointing: Any, resume: FirstResume, options: Options, allow: Allowed
) -> Callable[..., Any]:
    """Megatron-LM's ``load_checkpoint``, which compares the state that the first one has left."""
    theirs = checkpointing.load_checkpoint

    @wraps(theirs)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if resume.is_over:
            return theirs(*args, **kwargs)
        calls: dict[str, Callable[[], Any]] = {}
        with _recorded(checkpointing, calls):
            result = theirs(*args, **kwargs)
        resume.is_over, flags = True, checkpointing.get_args()
        is_whole = not any(getattr(flags, name, False) for name in _PARTIAL)
        if resume.place is not None and is_whole and _MAKERS[0] in calls:
            _compare(resume.place, calls, options, allow)
        return result

    return load_checkpoint


@contextmanager
def _recorded(module: Any, calls: dict[str, Any]) -> Iterator[None]:
    """Note the last arguments of what makes a state dict."""
    held = {name: getattr(module, name) for name in _MAKERS if hasattr(module, name)}

    def record(name: str, *args: Any, **kwargs: Any) -> Any:
        calls[name] = signature(held[name]).bind(*args, **kwargs)
        return held[name](*args, **kwargs)

    for name in held:
        setattr(module, name, partial(record, name))
    try:
        yield
    finally:
        for name, function in held.items():
            setattr(module, name, function)
            if name in calls:
                calls[name] = partial(_again, function, calls[name])


def _again(function: Callable[..., Any], call: Any, **changes: Any) -> Any:
    """The result of a function now, as for a save."""
    arguments = dict(call.arguments)
    for name, value in arguments.items():
        if isinstance(value, dict) and "is_loading" in value:
            arguments[name] = {k: v for k, v in value.items() if k != "is_loading"}
    return function(**arguments | changes)


def _compare(
    place: str, calls: dict[str, Callable[..., Any]], options: Options, allow: Allowed
) -> None:
    def state() -> StateDict:
        random = {"rng_state": calls[_MAKERS[1]]()} if has_random else {}
        state_now: StateDict = calls[_MAKERS[0]](**random)
        return state_now

    has_random = _MAKERS[1] in calls  # not after a change of TP or PP: Megatron-LM draws anew
    ignored = _IGNORED if has_random else (*_IGNORED, "*rng_state")
    try:
        report = compare(state, place, ignore=ignored, allow=allow, options=options)
    except (PeerTimeoutError, PeerLostError):
        raise
    except CheckpointError as error:  # on all ranks alike
        logger.warning("%s: the state cannot be compared with it: %s", place, error)
        return
    if global_rank() == 0:
        logger.log(logging.INFO if report.is_equal else logging.WARNING, "%s", report)
