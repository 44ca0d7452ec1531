"""Names, sizes and counts as commands show them."""

from __future__ import annotations

_UNIT = 1000
_UNITS = ("kB", "MB", "GB", "TB", "PB")
_DIGITS = 100


def printable(text: str) -> str:
    """The text with everything that could move a terminal's cursor spelled out, on one line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def bytes_text(nbytes: int) -> str:
    """Such as ``38.1 MB``: three digits or more, in powers of ten."""
    if nbytes < _UNIT:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in _UNITS:
        amount /= _UNIT
        if round(amount) < _UNIT:
            break
    digits = 0 if round(amount, 1) >= _DIGITS else 1 if round(amount, 2) >= _DIGITS / 10 else 2
    return f"{amount:.{digits}f} {unit}"


def counted(count: int, name: str) -> str:
    """Such as ``1 array`` and ``2,000 arrays``."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"
