"""Members of enums that the installed release no longer has, and old checkpoints still name."""

from __future__ import annotations

import io
import logging
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

logger = logging.getLogger(__name__)

_NOT_A_MEMBER = re.compile(r" is not a valid (\w+)$")
_PICKLE = "/data.pkl"


Entry = tuple[Callable[[Any], Any], str]
"""What may be called when an archive is read, and the name under which it asks for that."""


def asking_elsewhere(
    content: bytes, error: Exception, allowed: Iterable[Any]
) -> tuple[bytes, Entry] | None:
    """The archive anew, where it could not be read for the lack of a member of an allowed enum.

    Args:
        content: what ``torch.save`` has written.
        error: what reading it raised.
        allowed: may be unpickled.

    Returns:
        An archive that asks the entry beside it for the enum's members; None if the error is
        another one, or the archive does not ask for that enum itself.
    """
    said = _NOT_A_MEMBER.search(str(error))
    if said is None:
        return None
    enums = [kind for kind in allowed if isinstance(kind, type) and issubclass(kind, Enum)]
    for kind in enums:
        if kind.__qualname__ == said[1]:
            written = _with_renamed(content, kind)
            if written is not None:
                return written, _entry_of(kind)
    return None


def _with_renamed(content: bytes, kind: type[Enum]) -> bytes | None:
    """The archive with another name for an enum; None if that is not in it."""
    written, is_changed = io.BytesIO(), False
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as new,
    ):
        for name in old.namelist():
            entry = old.read(name)
            found = _renamed(entry, kind) if name.endswith(_PICKLE) else entry
            is_changed |= found != entry
            new.writestr(name, found)
    return written.getvalue() if is_changed else None


def _entry_of(kind: type[Enum]) -> Entry:
    """What gives the members of an enum, the plain value of one that it lacks, and its name."""

    def member(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            logger.warning(
                "%s has no member %r any more; it is left as %r", _name_of(kind), value, value
            )
            return value

    return member, f"former.{_name_of(kind)}"


def _name_of(kind: type[Enum]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _renamed(pickled: bytes, kind: type[Enum]) -> bytes:
    """The pickle with the enum's name, where it is a name of what to call, changed."""
    parts, done = [], 0
    for opcode, argument, position in pickletools.genops(pickled):
        asks = opcode.name == "GLOBAL" and argument == f"{kind.__module__} {kind.__qualname__}"
        if asks and position is not None:
            old = f"c{kind.__module__}\n{kind.__qualname__}\n".encode()
            parts += [pickled[done:position], f"cformer\n{_name_of(kind)}\n".encode()]
            done = position + len(old)
    return b"".join([*parts, pickled[done:]])
