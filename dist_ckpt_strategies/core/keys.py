"""Say which array and object keys a directory tree can hold."""

from __future__ import annotations

import re
from collections.abc import Collection

from dist_ckpt_strategies.errors import PlanError

RESERVED_NAMES = frozenset({"common.pt", "metadata.json"})
_MAX_COMPONENT_NBYTES = 255
_FILES_OF_AN_ARRAY = re.compile(r"\.zarray|\.zattrs|\.zgroup|\d+(\.\d+)*")
_READERS_NAMES = re.compile(r"\.zarray|metadata\.json|common\.pt|shard_\d+(\.\d+)*_\d+(\.\d+)*\.pt")
"""A directory of such a name would be taken for the file that marks an array, a checkpoint, an
object."""
_LEAVING_PREFIXES = (".removed-", ".partial-")


def require_storable_keys(array_keys: Collection[str], object_keys: Collection[str]) -> None:
    """Raise unless every key names a directory of its own below the checkpoint.

    Raises:
        PlanError: a key is empty, leaves the directory, is too long for a file system, or
            collides with a file of the checkpoint or of another array.
    """
    arrays = frozenset(array_keys)
    for key in sorted(arrays.union(object_keys)):
        problem = _problem(key) or _collision(key, arrays)
        if problem:
            raise PlanError(f"key {key!r} cannot be stored: {problem}", key=key)


def _problem(key: str) -> str | None:
    parts = key.split("/")
    checks = {
        "it is empty": not key,
        "it holds a NUL character": "\0" in key,
        "it holds a backslash, which TensorStore takes for '/'": "\\" in key,
        "it starts or ends with '/' or holds an empty, '.' or '..' component": any(
            part in {"", ".", ".."} for part in parts
        ),
        f"'{parts[0]}' is a file of every checkpoint": parts[0] in RESERVED_NAMES,
        "a component ends in '.__lock'": any(part.endswith(".__lock") for part in parts),
        "a component is the name of a file that marks an array, object or checkpoint": any(
            _READERS_NAMES.fullmatch(part) for part in parts
        ),
        "a component is the name of something on its way out": any(
            part.startswith(_LEAVING_PREFIXES) for part in parts
        ),
    }
    return next((text for text, wrong in checks.items() if wrong), None) or _too_long(parts)


def _too_long(parts: list[str]) -> str | None:
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "it cannot be encoded as UTF-8"
    if max(sizes) > _MAX_COMPONENT_NBYTES:
        return (
            f"a component has {max(sizes)} bytes, file systems take {_MAX_COMPONENT_NBYTES}; "
            "shorten it or split it with '/'"
        )
    return None


def _collision(key: str, array_keys: frozenset[str]) -> str | None:
    """Where the key's directory would take the place of a file of an array above it."""
    parts = key.split("/")
    for depth in range(1, len(parts)):
        above = "/".join(parts[:depth])
        if above in array_keys and _FILES_OF_AN_ARRAY.fullmatch(parts[depth]):
            return f"'{parts[depth]}' is a file of the array {above!r}"
    return None
