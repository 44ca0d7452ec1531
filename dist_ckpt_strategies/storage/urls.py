"""The address of a checkpoint in an object store."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from dist_ckpt_strategies.errors import StrategyError

SCHEMES = ("s3", "gs")

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}[A-Za-z0-9]")
_REFUSED = frozenset("?#\\*[]\0")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """``scheme://bucket/path``.

    Attributes:
        scheme: ``"s3"`` or ``"gs"``.
        bucket: name of the bucket.
        path: what the names of all objects of the checkpoint start with, without a ``/`` at either
            end; empty for the whole bucket.
    """

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        """The URL, without a ``/`` at its end."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.path}" if self.path else "")

    @property
    def prefix(self) -> str:
        """What stands before a name below the checkpoint, in the name of an object."""
        return f"{self.path}/" if self.path else ""

    def below(self, name: str) -> Self:
        """The address of what lies below this one, under a name without a ``/``."""
        return replace(self, path=f"{self.prefix}{name}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The address that a URL states.

        Raises:
            StrategyError: it states none; says why.
        """
        scheme, _, rest = text.partition("://")
        if scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://bucket/path" for scheme in SCHEMES)
            raise StrategyError(f"{text}: expected {known}, file:///path or a path")
        bucket, _, path = rest.partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise StrategyError(f"{text}: {bucket!r} is no name of a bucket")
        path = path.rstrip("/")
        parts = path.split("/") if path else []
        if _REFUSED.intersection(path) or any(part in {"", ".", ".."} for part in parts):
            raise StrategyError(
                f"{text}: a path in a bucket has no empty part, no '.', '..' and none of ?#\\*[]"
            )
        return cls(scheme, bucket, path)


_LOST_A_SLASH = re.compile(rf"({'|'.join(SCHEMES)}|file):/(?!/)")
_LACKS_SLASHES = re.compile(rf"({'|'.join(SCHEMES)}|file):(?!//)")


def parsed_address(address: str | Path, *, what: str = "checkpoint_dir") -> Path | StoreUrl:
    """What a caller means: ``s3://``, ``gs://``, ``file:///`` or a path, which becomes absolute.

    Args:
        address: of a checkpoint, or of what holds several.
        what: what an empty one is the address of, for messages.

    Raises:
        StrategyError: it is no address, or a Path made of a URL.
    """
    given: Any = address
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:  # None and numbers would name directories
        raise StrategyError(f"{what}: expected a str or a Path without NUL, found {address!r}")
    if not text:
        raise StrategyError(f"{what} is empty; name the checkpoint's directory")
    if isinstance(address, Path) and _LOST_A_SLASH.match(text):
        raise StrategyError(f"{text}: a Path takes slashes out of a URL; pass it as a str")
    scheme = _LACKS_SLASHES.match(text)
    if scheme and not isinstance(address, Path):  # a typing error, and no directory
        raise StrategyError(
            f"{text}: a URL begins with {scheme[0]}//; a directory of that name is ./{text}"
        )
    if text.startswith("file://"):
        host, slash, path = text.removeprefix("file://").partition("/")
        if host not in {"", "localhost"} or not slash:
            raise StrategyError(f"{text}: expected file:///path")
        return Path("/", unquote(path))
    if "://" in text:
        return StoreUrl.parse(text)
    return Path(text).absolute()
