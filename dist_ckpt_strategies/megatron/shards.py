"""Megatron-Core's sharded tensors and objects as specs and messages; its save and load in steps."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensorFactory,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from megatron.core.dist_checkpointing.validation import (
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
    validate_integrity_and_strict_load,
)

from dist_ckpt_strategies.core.array import DType, ObjectId, Region, Shape, ShardId, ShardSpec
from dist_ckpt_strategies.device import require_plain
from dist_ckpt_strategies.errors import PlanError, some_of
from dist_ckpt_strategies.megatron.types import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    StrictHandling,
)

logger = logging.getLogger(__name__)

StateDict = dict[Any, Any]

Message = list[Any]
"""Description of a ShardedTensor or ShardedObject for other ranks, of JSON types."""

_NUM_OBJECT_FIELDS = 4


def sharded_values(state_dict: StateDict) -> Iterator[Any]:
    """Every ShardedTensor and ShardedObject of a nested state dict, in its order.

    Raises a PlanError if a value is neither.
    """
    for value in nested_values(state_dict):
        if not isinstance(value, (ShardedTensor, ShardedObject)):
            raise PlanError(
                f"expected ShardedTensor and ShardedObject values, found {type(value).__name__}"
            )
        yield value


def require_readable(values: Iterable[Any], kind: Any = ShardedTensor) -> None:
    """Raise a PlanError if the data of a tensor or factory does not lie in memory of its own."""
    for value in values:
        if isinstance(value, kind) and value.data is not None:
            require_plain(value.data, key=value.key)


def padding_in(state: Any) -> Iterator[Any]:
    """The ShardedTensors that Megatron-Core marks as padding: their elements mean nothing.

    It makes them, uninitialised, between the parameters of a flat buffer.
    """
    if isinstance(state, dict):
        mark = state.get("padding")
        if isinstance(mark, LocalNonpersistentObject) and mark.unwrap() is True:
            tensors = (value for value in state.values() if isinstance(value, ShardedTensor))
            yield from (tensor for tensor in tensors if tensor.data is not None)
            return
        state = list(state.values())
    if isinstance(state, list):
        for value in state:
            yield from padding_in(value)


def is_main(value: Any) -> bool:
    """Whether this replica is the one that is written; errors are those of ``message_of``."""
    return is_main_message(message_of(value))


def shard_spec(tensor: Any) -> ShardSpec:
    """The spec of a ShardedTensor; errors as of ``message_of``."""
    spec = shard_from_message(message_of(tensor))
    assert spec is not None  # noqa: S101 - it is no ShardedObject
    return spec


def shard_data(tensor: Any) -> torch.Tensor:
    """The data of a ShardedTensor, shaped like its region; a view, not a copy.

    Raises a PlanError if it has none in memory of its own, of the shape and dtype that it says.
    """
    require_readable([tensor])
    if tensor.data is None:
        raise PlanError(f"{tensor.key}: the ShardedTensor has no data to save", key=tensor.key)
    data: torch.Tensor = tensor.data.detach()
    actual = (tuple(data.shape), data.dtype)
    expected = (tuple(tensor.local_shape), tensor.dtype)
    if actual != expected:
        raise PlanError(
            f"{tensor.key}: the data is {actual[0]} of {actual[1]}, but the ShardedTensor says "
            f"{expected[0]} of {expected[1]}; create it from the data",
            key=tensor.key,
        )
    return data[(None,) * tensor.prepend_axis_num]


def object_id(sharded_object: Any) -> ObjectId:
    """The name of a ShardedObject; errors are those of ``message_of``."""
    return object_from_message(message_of(sharded_object))


def metadata_tensor(key: str, shape: Shape, dtype: str) -> Any:
    """A ShardedTensor without data that stands for a whole stored array."""
    zeros, ones = (0,) * len(shape), (1,) * len(shape)
    return ShardedTensor(key, None, getattr(torch, dtype), shape, shape, zeros, ones)


def metadata_object(name: ObjectId) -> Any:
    """A ShardedObject without data that stands for a stored one."""
    return ShardedObject(name.key, None, name.shape, name.offset)


def message_of(value: Any) -> Message:
    """A ShardedTensor or ShardedObject without its data, as JSON types for other ranks.

    Raises a PlanError if its key is no text, its replica_id no number nor numbers, or a tensor has
    a flattened range.
    """
    key, replica = value.key, value.replica_id
    if not isinstance(key, str):
        raise PlanError(f"expected text as key of a {type(value).__name__}, found {key!r}")
    try:
        replica = [*map(int, replica)] if isinstance(replica, Sequence) else int(replica)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{key}: expected a number or several as replica_id, found {replica!r}", key=key
        ) from error
    where = [key, [*map(int, value.global_shape)], [*map(int, value.global_offset)], replica]
    if isinstance(value, ShardedObject):
        return where
    if getattr(value, "flattened_range", None) is not None:
        raise PlanError(
            f"{key}: flattened ranges are not supported, Megatron-Core 0.16 removed them; "
            "use the fully_reshardable or dp_reshardable optimizer format",
            key=key,
        )
    fragments = value.axis_fragmentations
    return [
        *where,
        str(value.dtype).removeprefix("torch."),
        [*map(int, value.local_shape)],
        None if fragments is None else [*map(int, fragments)],
        int(value.prepend_axis_num),
        bool(value.allow_shape_mismatch),
    ]


def digest_of(messages: Sequence[Any]) -> str:
    """A digest of messages, or of digests of them."""
    return xxhash.xxh3_128_hexdigest(json.dumps(messages).encode())


def value_from_message(message: Message) -> Any:
    """The ShardedTensor or ShardedObject, without data, that ``message_of`` described."""
    # JSON has no tuples.
    fields: Any = (tuple(field) if isinstance(field, list) else field for field in message)
    key, shape, offset, replica_id, *of_tensor = fields
    if not of_tensor:
        return ShardedObject(key, None, shape, offset, replica_id)
    dtype, local_shape, fragments, prepend, may_mismatch = of_tensor
    return ShardedTensor(
        key,
        None,
        getattr(torch, dtype),
        local_shape,
        shape,
        offset,
        fragments,
        replica_id,
        prepend,
        may_mismatch,
    )


def shard_from_message(message: Message) -> ShardSpec | None:
    """The spec of the ShardedTensor that ``message_of`` described; None of a ShardedObject.

    Prepended axes become dims of size 1. Raises a PlanError if its dtype cannot be stored.
    """
    if len(message) == _NUM_OBJECT_FIELDS:
        return None
    key, shape, offset, _, dtype, local_shape, _, prepend, may_mismatch = message
    region = Region(tuple(offset), (1,) * prepend + tuple(local_shape))
    return ShardSpec(
        ShardId(key, region),
        tuple(shape),
        DType.named(dtype, key=key),
        is_main=is_main_message(message),
        may_mismatch=may_mismatch,
    )


def object_from_message(message: Message) -> ObjectId:
    """The name of the ShardedObject that ``message_of`` described."""
    key, shape, offset, _ = message
    return ObjectId(key, tuple(offset), tuple(shape))


def is_on_grid(message: Message) -> bool:
    """Whether Megatron-Core would check it: an object, or a shard on a regular grid."""
    return len(message) == _NUM_OBJECT_FIELDS or message[6] is not None


def is_main_message(message: Message) -> bool:
    """Whether this replica is the one that is written."""
    replica = message[_NUM_OBJECT_FIELDS - 1]
    return not (replica if isinstance(replica, int) else any(replica))


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
"""The handling that returns the keys for which these raise."""


mapped_values: Callable[[Callable[[Any], Any], StateDict], StateDict] = dict_list_map_outplace
parsed_strict: Callable[[str | StrictHandling], StrictHandling] = parse_strict_flag


StrictOutcome = tuple[StateDict, set[str], set[str]]
"""The loaded state dict, missing keys, unexpected keys."""


def split_for_save(
    state_dict: StateDict, content_metadata: dict[str, Any] | None
) -> tuple[StateDict, StateDict]:
    """The sharded part, with factories applied, and the common state. Rank-local.

    Values that are not persistent are in neither. Padding becomes 0. Raises a PlanError if it is no
    dict.
    """
    _require_divisible(state_dict)
    for padding in padding_in(state_dict):  # else each save has other digests
        padding.data.zero_()
    whole = mapped_values(lambda value: value, state_dict)  # factories are replaced in place
    if content_metadata is not None:
        whole[CONTENT_METADATA_KEY] = content_metadata
    sharded, common = save_preprocess(whole, validate_access_integrity=False)
    content = common.get(CONTENT_METADATA_KEY)
    if isinstance(content, dict):
        common[CONTENT_METADATA_KEY] = {k: v for k, v in content.items() if k != _GROUP_KEY}
    return sharded, common


def split_for_load(state_dict: StateDict) -> tuple[StateDict, StateDict, StateDict]:
    """The part to load, with factories applied; non-persistent objects; factories. Rank-local.

    Raises a PlanError if it is no dict.
    """
    _require_divisible(state_dict)
    force_all_tensors_to_non_fp8(state_dict)
    sharded, nonpersistent, factories = load_preprocess(state_dict)
    sharded, _ = extract_sharded_base(sharded)
    return sharded, nonpersistent, factories


def _require_divisible(state_dict: object) -> None:
    """Raise a PlanError unless it is a dict, whose factories can be applied."""
    if not isinstance(state_dict, dict):
        kind = type(state_dict).__name__
        raise PlanError(f"expected a dict as sharded state dict, found a {kind}")
    require_readable(nested_values(state_dict), ShardedTensorFactory)


def apply_strictness(
    sharded: StateDict, strict: StrictHandling, local: Any, everyone: Any, stored: Any
) -> StrictOutcome:
    """Megatron-Core's comparison of wanted and stored keys; of objects, by shard. Rank-local.

    A shard of another grid than the one stored counts as a key that is not stored.

    Raises a PlanError that names the first key which ``strict`` does not allow.
    """
    compared = _RETURNING.get(strict, strict)
    sharded, missing, unexpected = validate_integrity_and_strict_load(
        sharded,
        compared,
        False,  # noqa: FBT003 - theirs
        local,
        everyone,
        stored,
    )
    if stored is not None:
        shards = {object_id(o) for o in stored.values() if isinstance(o, ShardedObject)}
        absent, rest = extract_matching_values(
            sharded, lambda v: isinstance(v, ShardedObject) and object_id(v) not in shards
        )
        if ids := sorted(map(object_id, nested_values(absent))):
            names = [shard.unique_key for shard in ids]
            if strict in {StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL}:
                logger.warning("left out, stored are other shards of it: %s", some_of(names))
            keys = {shard.key for shard in ids} if compared is strict else {*names}
            sharded, unexpected = rest, unexpected | keys
    if compared is not strict:
        try:
            maybe_report_missing_and_unexpected_keys(missing, unexpected)
        except CheckpointingException as error:
            key = min(unexpected or missing)
            raise PlanError(f"{key}: {error}", key=key) from error
    return sharded, missing, unexpected


def split_objects(sharded: StateDict) -> tuple[StateDict, StateDict]:
    """The sharded objects, and the rest."""
    split: tuple[StateDict, StateDict] = extract_matching_values(
        sharded, lambda value: isinstance(value, ShardedObject)
    )
    return split


def merged(base: StateDict, *others: StateDict, factories: StateDict | None = None) -> StateDict:
    """``base`` with the others merged into it, then with what factories make of their tensors.

    ``base`` itself is changed and returned. Raises a PlanError if two of them hold something at one
    place, such as common state of the checkpoint where a ShardedTensor is wanted.
    """
    try:
        for other in others:
            merge(base, other)
    except ValueError as error:
        text = str(error)
        if len(text) > _MAX_QUOTED:  # it holds the values, which may be tensors
            text = f"{text[: _MAX_QUOTED // 2]} ... {text[-_MAX_QUOTED // 2 :]}"
        raise PlanError(
            "the loaded state does not fit together; the checkpoint's common state may have "
            f"another type at a place of the sharded state dict: {text}"
        ) from error
    if factories:
        apply_factory_merges(base, factories)
    return base
