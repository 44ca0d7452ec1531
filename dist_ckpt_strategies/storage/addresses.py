"""What an address means, before anything that it takes to reach it is imported."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.spec.store_url import SCHEMES, StoreUrl

_LOST_A_SLASH = re.compile(rf"({'|'.join(SCHEMES)}|file):/(?!/)")
_LACKS_SLASHES = re.compile(rf"({'|'.join(SCHEMES)}|file):(?!//)")
_FILE = "file://"


def parsed_address(address: str | Path, *, what: str = "checkpoint_dir") -> Path | StoreUrl:
    """What a caller means: ``s3://``, ``gs://``, ``file:///`` or a path, which becomes absolute.

    Args:
        address: of a checkpoint, or of what holds several.
        what: what an empty one is the address of, for messages.

    Raises:
        StrategyError: it is no address, or a Path made of a URL.
    """
    text = _text(address, what)
    if not text:
        raise StrategyError(f"{what} is empty; name the checkpoint's directory")
    if isinstance(address, Path) and _LOST_A_SLASH.match(text):
        raise StrategyError(f"{text}: a Path takes slashes out of a URL; pass it as a str")
    scheme = _LACKS_SLASHES.match(text)
    if scheme and not isinstance(address, Path):  # a typing error, lest it becomes a directory
        raise StrategyError(
            f"{text}: a URL begins with {scheme[0]}//; a directory of that name is ./{text}"
        )
    if text.startswith(_FILE):
        return _path_of(text)
    if "://" in text:
        return StoreUrl.parse(text)
    return Path(text).absolute()


def _text(address: object, what: str) -> str:
    """The address as text; ``None`` and numbers would otherwise name directories."""
    text = os.fspath(address) if isinstance(address, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise StrategyError(f"{what}: expected a str or a Path without NUL, found {address!r}")
    return text


def _path_of(url: str) -> Path:
    host, slash, path = url.removeprefix(_FILE).partition("/")
    if host not in {"", "localhost"} or not slash:
        raise StrategyError(f"{url}: expected file:///path")
    return Path("/", unquote(path))
