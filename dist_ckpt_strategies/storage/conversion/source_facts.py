"""What a conversion knows a source by, and the file of its common state."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.storage.disk.files import (
    COMMON_NAME,
    MARKER_NAME,
    file_errors,
    read_file,
    storage_error,
)
from dist_ckpt_strategies.storage.format2.manifest import digest_of
from dist_ckpt_strategies.storage.locations import read_marker
from dist_ckpt_strategies.storage.objects.pickled import archive_damage


def common_file(root: Path) -> bytes:
    """The file of the common state in a directory.

    Raises:
        IncompleteCheckpointError: it is missing.
        CorruptCheckpointError: it is damaged.
    """
    path = root / COMMON_NAME
    with file_errors(None, path, not_found=IncompleteCheckpointError):
        content = read_file(path)
    require_archive(content, "common state", str(path))
    return content


def require_archive(content: bytes, name: str, path: str) -> None:
    """Raise unless the bytes are an archive of ``torch.save`` as it was written.

    Raises:
        CorruptCheckpointError: they are not.
    """
    damage = archive_damage(content)
    if damage:
        raise CorruptCheckpointError(f"{name}: {path} is damaged: {damage}", key=name, path=path)


def directory_identity(root: Path, description: bytes, common: bytes) -> str:
    """A digest of what describes the arrays, the common state, and when it was published."""
    path = root / MARKER_NAME
    try:
        published = path.stat().st_mtime_ns
    except OSError as error:
        raise storage_error(None, path, error) from error
    facts = [str(root), published, asdict(read_marker(root))]
    return digest_of_all(description, common, facts)


def digest_of_all(description: bytes, common: bytes, facts: list[Any]) -> str:
    """A digest of what describes the arrays, the common state, and facts of JSON types."""
    parts: Iterable[bytes] = (
        description,
        digest_of(common).encode(),
        json.dumps(facts).encode(),
    )
    return digest_of(b"".join(digest_of(part).encode() for part in parts))
