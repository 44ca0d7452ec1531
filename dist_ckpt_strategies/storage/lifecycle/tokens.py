"""Files by which ranks tell that they see one directory, and that no other save has begun there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.storage.disk.files import PARTIAL_PREFIX, file_errors

_PAUSE_S = 0.02
_WAIT_S = 30.0
"""How long a network file system may take to show a new file to another machine."""


def leave_token(root: Path, token: str) -> None:
    """Make a file by which others can tell that they see the same directory."""
    path = _token_path(root, token)
    with file_errors(None, path):
        path.touch()


def has_token(root: Path, token: str) -> bool:
    """Whether the file of ``leave_token`` is there."""
    path = _token_path(root, token)
    with file_errors(None, path):
        return path.exists()


def require_token(root: Path, token: str, owner: str, timeout_s: float) -> None:
    """Wait for the token that another rank has left.

    Raises:
        StorageError: it does not show up; the directory is not the same one.
    """
    wait_until_seen(str(root), _token_path(root, token).exists, owner, timeout_s)


def wait_until_seen(root: str, is_seen: Callable[[], bool], owner: str, timeout_s: float) -> None:
    """Wait until this rank sees what another one has written; not for long, in a save.

    Args:
        root: where.
        is_seen: looks.
        owner: of what is waited for.
        timeout_s: of the save.

    Raises:
        StorageError: it does not show up; the place is not the same one.
    """
    deadline = time.monotonic() + min(timeout_s / 2, _WAIT_S)
    while not is_seen():
        if time.monotonic() > deadline:
            raise StorageError(
                f"{root}: what {owner} has written there is not seen here; all ranks have to save "
                "to one directory, on a file system that they share, and no other job at the same "
                "time",
                path=root,
            )
        time.sleep(_PAUSE_S)


def remove_token(root: Path, token: str) -> None:
    """Remove the file of ``leave_token``, which the next save to the directory removes too.

    Raises:
        StorageError: it is gone.
    """
    path = _token_path(root, token)
    with file_errors(None, path):
        try:
            path.unlink()
        except FileNotFoundError:
            raise superseded(root) from None


def superseded(root: Path | str) -> StorageError:
    """The error for a save whose place belongs to another one by now."""
    return StorageError(
        f"{root}: another save to it has begun before this one was finished, or what this one had "
        "written was removed; nothing of it was made visible",
        path=str(root),
    )


def _token_path(root: Path, token: str) -> Path:
    return root / (PARTIAL_PREFIX + token)
