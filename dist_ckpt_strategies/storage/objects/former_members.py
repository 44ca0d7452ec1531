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


def enum_without_member(error: Exception, allowed: Iterable[Any]) -> type[Enum] | None:
    """The enum among those allowed that lacks what was asked of it; None for another error."""
    said = _NOT_A_MEMBER.search(str(error))
    enums = [kind for kind in allowed if isinstance(kind, type) and issubclass(kind, Enum)]
    return next((kind for kind in enums if said and kind.__qualname__ == said[1]), None)


def asking_elsewhere(content: bytes, kind: type[Enum]) -> bytes:
    """An archive of ``torch.save`` that asks ``entry_of(kind)`` for the members of an enum."""
    written = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as new,
    ):
        for name in old.namelist():
            entry = old.read(name)
            new.writestr(name, _renamed(entry, kind) if name.endswith(_PICKLE) else entry)
    return written.getvalue()


def entry_of(kind: type[Enum]) -> tuple[Callable[[Any], Any], str]:
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
