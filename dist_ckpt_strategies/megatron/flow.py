"""The steps of Megatron-Core's save and load, cut where ranks run them collectively."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from megatron.core.dist_checkpointing.validation import (
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
)

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.megatron.shards import StateDict, is_empty, mapped_values
from dist_ckpt_strategies.megatron.types import (
    CheckpointingException,
    ShardedObject,
    StrictHandling,
)

CONTENT_METADATA_KEY = "content_metadata"

_GROUP_KEY = "dp_cp_group"
"""Of the content metadata: a process group, which means nothing to another process."""

_MAX_QUOTED = 400

_RETURNING: Mapping[StrictHandling, StrictHandling] = MappingProxyType(
    {
        StrictHandling.RAISE_UNEXPECTED: StrictHandling.RETURN_UNEXPECTED,
        StrictHandling.RAISE_ALL: StrictHandling.RETURN_ALL,
    }
)
"""What tells the keys for which these raise."""


merge_factories: Callable[[StateDict, StateDict], StateDict] = apply_factory_merges
parsed_strict: Callable[[str | StrictHandling], StrictHandling] = parse_strict_flag


class SaveParts(NamedTuple):
    """A state dict to save, split: what is sharded, and what every rank holds alike."""

    sharded: StateDict
    common: StateDict


class LoadParts(NamedTuple):
    """A state dict to load, split: what is loaded, what stays, and how loaded tensors merge."""

    sharded: StateDict
    nonpersistent: StateDict
    factories: StateDict


class StrictOutcome(NamedTuple):
    """What is loaded, and the keys that only one side has."""

    sharded: StateDict
    missing: set[str]
    unexpected: set[str]


def split_for_save(state_dict: StateDict, content_metadata: dict[str, Any] | None) -> SaveParts:
    """Factories applied, non-persistent values dropped, sharded and common parted. Rank-local.

    Raises:
        PlanError: it is no dict.
    """
    _require_dict(state_dict)
    whole = mapped_values(lambda value: value, state_dict)  # factories are replaced in place
    if content_metadata is not None:
        whole[CONTENT_METADATA_KEY] = content_metadata
    sharded, common = save_preprocess(whole, validate_access_integrity=False)
    content = common.get(CONTENT_METADATA_KEY)
    if isinstance(content, dict):
        common[CONTENT_METADATA_KEY] = {k: v for k, v in content.items() if k != _GROUP_KEY}
    return SaveParts(sharded, common)


def require_equal_common(common: StateDict) -> None:
    """Megatron-Core's check that all ranks hold the same common state; it logs what differs.

    Collective over the world: a broadcast.
    """
    validate_sharding_integrity([], common_state_dict=common)


def require_valid_sharding(everyone: list[list[Any]]) -> None:
    """Megatron-Core's check, on rank 0, that the main replicas make up every array and object.

    Empty tensors are left out: Megatron-Core 0.16.1 divides by their extent. Arrays and objects
    are checked apart: it takes the values of one key for all of one kind.

    Raises:
        PlanError: elements or objects are missing, or held twice; names the key.
    """
    for is_object in (False, True):
        chosen = [
            [v for v in values if isinstance(v, ShardedObject) is is_object and not is_empty(v)]
            for values in everyone
        ]
        error = _sharding_error(chosen)
        if error is not None:
            keys = sorted({value.key for values in chosen for value in values})
            key = next((key for key in keys if _sharding_error(_of_key(chosen, key))), None)
            raise PlanError(
                f"{key}: the shards of all ranks do not fit together: {error}", key=key
            ) from error


def _of_key(everyone: list[list[Any]], key: str) -> list[list[Any]]:
    return [[value for value in values if value.key == key] for values in everyone]


def _sharding_error(everyone: list[list[Any]]) -> Exception | None:
    """What Megatron-Core's check raises; of what lies outside its grid that can be anything."""
    try:
        validate_sharding_integrity(everyone)
    except (
        CheckpointingException,
        AssertionError,
        ArithmeticError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        return error
    return None


def split_for_load(state_dict: StateDict) -> LoadParts:
    """Factories applied, non-persistent values kept apart. Rank-local.

    Raises:
        PlanError: it is no dict.
    """
    _require_dict(state_dict)
    force_all_tensors_to_non_fp8(state_dict)
    sharded, nonpersistent, factories = load_preprocess(state_dict)
    sharded, _ = extract_sharded_base(sharded)
    return LoadParts(sharded, nonpersistent, factories)


def _require_dict(state_dict: Any) -> None:
    if not isinstance(state_dict, dict):
        raise PlanError(
            f"expected a dict as sharded state dict, found a {type(state_dict).__name__}"
        )


def needs_stored_keys(strict: StrictHandling) -> bool:
    """Whether the strictness compares with the keys in the checkpoint."""
    return bool(StrictHandling.requires_explicit_ckpt_mismatch_check(strict))


def apply_strictness(
    sharded: StateDict, strict: StrictHandling, local: Any, everyone: Any, stored: Any
) -> StrictOutcome:
    """Megatron-Core's comparison of wanted and stored keys. Rank-local.

    Raises:
        PlanError: there are keys that ``strict`` does not allow; names the first.
    """
    compared = _RETURNING.get(strict, strict)
    outcome = StrictOutcome(
        *validate_integrity_and_strict_load(sharded, compared, False, local, everyone, stored)  # noqa: FBT003 - theirs
    )
    if compared is not strict:
        try:
            maybe_report_missing_and_unexpected_keys(outcome.missing, outcome.unexpected)
        except CheckpointingException as error:
            key = min(outcome.unexpected or outcome.missing)
            raise PlanError(f"{key}: {error}", key=key) from error
    return outcome


def split_objects(sharded: StateDict) -> tuple[StateDict, StateDict]:
    """The sharded objects, and the rest."""
    found: tuple[StateDict, StateDict] = extract_matching_values(
        sharded, lambda value: isinstance(value, ShardedObject)
    )
    return found


def merged(base: StateDict, *others: StateDict) -> StateDict:
    """``base`` with the others merged into it; ``base`` itself is changed and returned.

    Raises:
        PlanError: two of them hold something at one place, such as common state of the checkpoint
            where a ShardedTensor is wanted.
    """
    try:
        for other in others:
            merge(base, other)
    except ValueError as error:
        text = str(error)
        if len(text) > _MAX_QUOTED:  # it holds the values, which may be tensors
            text = f"{text[: _MAX_QUOTED // 2]} ... {text[-_MAX_QUOTED // 2 :]}"
        raise PlanError(
            "what was loaded does not fit together; common state of the checkpoint may stand where "
            f"the sharded state dict has something else: {text}"
        ) from error
    return base


def parallel_sizes() -> dict[str, int]:
    """Sizes of the kinds of parallelism, by name; empty where Megatron-Core was not set up."""
    if not parallel_state.model_parallel_is_initialized():
        return {}
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }
