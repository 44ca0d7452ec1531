"""The common state where it is no file: Megatron-Core 0.19 and later keep it among the objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.objects.pickled import dump_object, plain_value

COMMON_OBJECT = ObjectId("common_state", (0,), (1,))
"""The one shard that holds it."""

ReadFile = Callable[[], bytes]
"""Gives the file of the common state; raises IncompleteCheckpointError where there is none."""


def common_or_object(
    read_file: ReadFile, objects: Sequence[ObjectId], read_object: Callable[[ObjectId], bytes]
) -> bytes:
    """The file of the common state, or what such a file would hold.

    Args:
        read_file: gives the file.
        objects: all that the checkpoint has.
        read_object: gives one of them, for ``load_content``.

    Raises:
        IncompleteCheckpointError: it is neither a file nor an object.
    """
    try:
        return read_file()
    except IncompleteCheckpointError:
        if COMMON_OBJECT not in objects:
            raise
    content = read_object(COMMON_OBJECT)
    plain = plain_value(content)
    return content if plain is None else dump_object(plain.value, name=COMMON_OBJECT.unique_key)


def beside_common(read_file: ReadFile, objects: Sequence[ObjectId]) -> tuple[ObjectId, ...]:
    """The objects without the one that is the common state."""
    if COMMON_OBJECT in objects:
        try:
            read_file()
        except IncompleteCheckpointError:
            return tuple(found for found in objects if found != COMMON_OBJECT)
    return tuple(objects)
