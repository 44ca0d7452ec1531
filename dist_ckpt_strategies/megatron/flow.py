"""The steps of Megatron-Core's save and load, cut where ranks have to agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import (
    _clean_metadata_for_serialization,
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from megatron.core.dist_checkpointing.validation import (
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
    validate_sharding_integrity,
)

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.megatron.bases import (
    CheckpointingException,
    ShardedObject,
    StrictHandling,
)
from dist_ckpt_strategies.megatron.shards import StateDict, is_empty, mapped_values

CONTENT_METADATA_KEY = "content_metadata"


@dataclass(frozen=True, slots=True)
class SaveParts:
    """A state dict to save, taken apart: what is sharded, and what every rank holds alike."""

    sharded: StateDict
    common: StateDict


@dataclass(frozen=True, slots=True)
class LoadParts:
    """A state dict to load, taken apart.

    Attributes:
        sharded: ShardedTensors and ShardedObjects to load.
        nonpersistent: values that stay as they are in this process.
        factories: how loaded tensors are merged afterwards.
    """

    sharded: StateDict
    nonpersistent: StateDict
    factories: StateDict


@dataclass(frozen=True, slots=True)
class StrictOutcome:
    """What is loaded, and the keys that only one side has."""

    sharded: StateDict
    missing: set[str]
    unexpected: set[str]


def take_apart_for_save(
    state_dict: StateDict, content_metadata: dict[str, Any] | None
) -> SaveParts:
    """Factories applied, non-persistent values dropped, sharded and common parted. Rank-local."""
    whole = mapped_values(lambda value: value, state_dict)  # factories are replaced in place
    if content_metadata is not None:
        whole[CONTENT_METADATA_KEY] = content_metadata
    sharded, common = save_preprocess(whole, validate_access_integrity=False)
    if CONTENT_METADATA_KEY in common:
        common[CONTENT_METADATA_KEY] = _clean_metadata_for_serialization(
            common[CONTENT_METADATA_KEY]
        )
    return SaveParts(sharded, common)


def require_valid_sharding(everyone: list[list[Any]], common: StateDict | None = None) -> None:
    """Megatron-Core's check, on rank 0, that the main replicas make up every array and object.

    Empty tensors are left out: Megatron-Core 0.16.1 divides by their extent. Where ``common`` is
    given its consistency is checked too, collectively over the world, by a broadcast.

    Raises:
        PlanError: elements or objects are missing, or held twice.
    """
    checked = [[value for value in values if not is_empty(value)] for values in everyone]
    try:
        validate_sharding_integrity(checked, common_state_dict=common)
    except (CheckpointingException, AssertionError) as error:
        raise PlanError(f"the shards of all ranks do not fit together: {error}") from error


def take_apart_for_load(state_dict: StateDict) -> LoadParts:
    """Factories applied, non-persistent values kept apart. Rank-local."""
    force_all_tensors_to_non_fp8(state_dict)
    sharded, nonpersistent, factories = load_preprocess(state_dict)
    sharded, _ = extract_sharded_base(sharded)
    return LoadParts(sharded, nonpersistent, factories)


def parsed_strict(strict: str | StrictHandling) -> StrictHandling:
    """The strictness, from its name or itself."""
    return parse_strict_flag(strict)


def needs_stored_keys(strict: StrictHandling) -> bool:
    """Whether the strictness compares with the keys in the checkpoint."""
    return bool(StrictHandling.requires_explicit_ckpt_mismatch_check(strict))


def needs_global_keys(strict: StrictHandling) -> bool:
    """Whether the strictness compares with the keys that all ranks want."""
    return bool(StrictHandling.requires_global_app_metadata(strict))


def returns_keys(strict: StrictHandling) -> bool:
    """Whether ``load`` returns missing and unexpected keys beside the state dict."""
    return bool(StrictHandling.requires_returning_mismatch_keys(strict))


def apply_strictness(
    sharded: StateDict, strict: StrictHandling, local: Any, everyone: Any, stored: Any
) -> StrictOutcome:
    """Megatron-Core's comparison of wanted and stored keys. Rank-local."""
    found = validate_integrity_and_strict_load(sharded, strict, False, local, everyone, stored)  # noqa: FBT003 - theirs
    return StrictOutcome(*found)


def split_objects(sharded: StateDict) -> tuple[StateDict, StateDict]:
    """The sharded objects, and the rest."""
    found: tuple[StateDict, StateDict] = extract_matching_values(
        sharded, lambda value: isinstance(value, ShardedObject)
    )
    return found


def require_objects_handled(sharded_strategy: Any, common_strategy: Any) -> None:
    """Raise where neither strategy handles ShardedObjects."""
    validate_sharded_objects_handling(sharded_strategy, common_strategy)


def merged(base: StateDict, *others: StateDict) -> StateDict:
    """``base`` with the others merged into it; ``base`` itself is changed and returned."""
    for other in others:
        merge(base, other)
    return base


def merge_factories(state_dict: StateDict, factories: StateDict) -> StateDict:
    """The loaded state dict with the factories' merges applied."""
    found: StateDict = apply_factory_merges(state_dict, factories)
    return found
