"""The marker of a checkpoint that may be damaged."""

from __future__ import annotations

from pathlib import Path

from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.disk.files import MARKER_NAME, MAX_JSON_NBYTES, read_file
from dist_ckpt_strategies.storage.disk.folders import reason
from dist_ckpt_strategies.storage.findings import NO_FILE, Finding, Problem, unreadable


def marker_or_finding(root: Path) -> CheckpointMarker | Finding:
    """The marker in a directory, or what is wrong with it."""
    try:
        return parsed_or_finding(read_file(root / MARKER_NAME, MAX_JSON_NBYTES))
    except FileNotFoundError:
        return missing_marker()
    except OSError as error:
        return unreadable(None, MARKER_NAME, reason(error))
    except ValueError as error:
        return _bad_marker(error)


def parsed_or_finding(content: bytes) -> CheckpointMarker | Finding:
    """The marker that the bytes of its file hold, or what is wrong with them."""
    try:
        return CheckpointMarker.from_json(content)
    except (ValueError, TypeError) as error:
        return _bad_marker(error)


def missing_marker() -> Finding:
    """What is wrong where there is no marker."""
    expected = "the last file that a save writes"
    return Finding(Problem.MISSING_MARKER, None, MARKER_NAME, expected, NO_FILE)


def _bad_marker(error: Exception) -> Finding:
    expected = "the fields of a marker as JSON"
    return Finding(Problem.BAD_MARKER, None, MARKER_NAME, expected, str(error))
