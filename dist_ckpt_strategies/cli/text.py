"""Names, sizes and counts as commands show them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.spec.region import Extent

_UNIT = 1000
_UNITS = ("kB", "MB", "GB", "TB", "PB")


def printable(text: str) -> str:
    """The text on one line, with everything that could steer a terminal spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def bytes_text(nbytes: int) -> str:
    """Such as ``38.1 MB``: three digits, in powers of ten."""
    if nbytes < _UNIT:
        return f"{nbytes} B"
    amount, power = nbytes / _UNIT, 0
    while round(amount) >= _UNIT and power + 1 < len(_UNITS):
        amount, power = amount / _UNIT, power + 1
    digits = 2 if round(amount, 2) < 10 else 1 if round(amount, 1) < 100 else 0  # noqa: PLR2004
    return f"{amount:.{digits}f} {_UNITS[power]}"


def extent_text(extent: Extent) -> str:
    """Such as ``4x512``."""
    return "x".join(map(str, extent)) or "scalar"


def is_wanted(key: str, keys: str | None) -> bool:
    """Whether a key matches a pattern, if there is one; ``*`` stands for any characters."""
    return keys is None or fnmatchcase(key, keys)


def require_match(root: object, what: str, count: int, keys: str | None, found: object) -> None:
    """Raise where a pattern was given, and nothing matches it.

    Args:
        root: the checkpoint.
        what: the pattern is for: ``keys``, say.
        count: how many of these there are.
        keys: the pattern.
        found: what matches; falsy for nothing.

    Raises:
        ArrayNotFoundError: nothing does.
    """
    if keys is not None and not found:
        raise ArrayNotFoundError(f"{root}: none of its {count} {what} matches {keys!r}")


def counted(count: int, name: str) -> str:
    """Such as ``1 array`` and ``2,000 arrays``."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"
