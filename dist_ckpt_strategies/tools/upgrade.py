"""The optimizer's state in the form that Megatron-Core 0.16 and later read."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.objects import Allowed, dump_object, load_content

_OLD_FORM = "fully_sharded_model_space"
"""Written by Megatron-Core up to 0.15.3, and NeMo 1.x."""

_NEW_FORM = "fully_reshardable"
"""Read and written by Megatron-Core 0.15 and later: the same whole arrays, other names."""

_MASTER = re.compile(r"((?:chained_\d+\.)*optimizer\.state\.)fp32_param\.(.+)", re.DOTALL)
_FORM = "param_state_sharding_type"
_METADATA_FORM = "distrib_optim_sharding_type"


def upgraded_keys(keys: Collection[str]) -> dict[str, str]:
    """The new key of each array that has one: ``fp32_param`` is called ``param`` now."""
    matches = {key: _MASTER.fullmatch(key) for key in keys}
    return {key: f"{match[1]}param.{match[2]}" for key, match in matches.items() if match}


def renamed_keys(mine: Collection[str], theirs: Collection[str]) -> dict[str, str]:
    """The keys of the first that the second has under another name, if either was upgraded."""
    own_keys, others = {*mine}, {*theirs}
    forth = {
        old: new
        for old, new in upgraded_keys(own_keys - others).items()
        if new in others and new not in own_keys
    }
    back = {
        new: old
        for old, new in upgraded_keys(others - own_keys).items()
        if new in own_keys and new not in others
    }
    return forth | back


def upgraded_common(
    content: bytes, path: str, allow: Allowed, *, is_required: bool = True
) -> bytes:
    """The file of the common state in which every distributed optimizer is fully_reshardable.

    Parameters' own states of the old form, which hold no more than a step, are gone; the step is
    that of the parameter groups, and put there where they lack it. Raises a StrategyError if no
    optimizer in it is of the old form, where that ``is_required``, or its steps differ.
    """
    state = load_content(content, path, "common state", allow)
    optimizers = [held for held in _dicts(state) if _FORM in held]
    old = [held for held in optimizers if held[_FORM] == _OLD_FORM]
    if not old and is_required:
        forms = sorted({str(held[_FORM]) for held in optimizers})
        raise StrategyError(
            f"{path}: nothing to upgrade; expected a distributed optimizer of the form "
            f"{_OLD_FORM}, found {', '.join(forms) or 'none'}"
        )
    for optimizer in old:
        optimizer[_FORM] = _NEW_FORM
        params = _dicts(optimizer.pop("param_state", {}))
        numbers = [param["step"] for param in params if "step" in param]
        steps = {step.item() if hasattr(step, "item") else step for step in numbers}
        for group in optimizer.get("optimizer", {}).get("param_groups", ()):
            if "step" in group or not steps:
                continue
            if len(steps) > 1:
                raise StrategyError(
                    f"{path}: parameters of one optimizer have taken different numbers of steps "
                    f"({sorted(steps)}), which {_NEW_FORM} cannot express"
                )
            (group["step"],) = steps
    for held in _dicts(state):
        if held.get(_METADATA_FORM) == _OLD_FORM:
            held[_METADATA_FORM] = _NEW_FORM
    return dump_object(state, name="common state")


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    """Every dict within nested dicts and lists, the outer ones first."""
    if isinstance(value, dict):
        yield value
        for held in value.values():
            yield from _dicts(held)
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from _dicts(held)
