"""A place in an object store that holds many checkpoints, and how one is removed. No torch.

An object store does not tell when an object was written: the age of a checkpoint is that of the
first object of its save, which says when it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dist_ckpt_strategies.errors import CheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.bucket_commit import (
    SAVE_PREFIX,
    current_place,
    remove,
    require_something,
    visible_place,
)
from dist_ckpt_strategies.formats.issues import Problem, lacks_files, marker_or_issue
from dist_ckpt_strategies.formats.manifest import INDEX_NAME, SAVE_NAME, parse_index
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.zarr3_scan import FORMAT2, read_begun, scan_format2
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import MARKER_NAME
from dist_ckpt_strategies.tools.plan_prune import FoundCheckpoint, Status
from dist_ckpt_strategies.tools.prune import TRACKER_NAME, is_a_checkpoint, iteration_of


class CheckpointBucket:
    """Checkpoints below a URL; see CheckpointDirectory. All names are held in memory."""

    def __init__(self, root: Bucket) -> None:
        self.root = root

    def find(self, now_s: float) -> Sequence[FoundCheckpoint]:
        """See CheckpointDirectory. One list of names, a few requests per checkpoint."""
        names = [name.partition("/") for name in self.root.names("")]
        if not names:
            require_something(self.root)
        if any(_is_known_by("".join(name)) for name in names):
            raise is_a_checkpoint(self.root)
        known = {top for top, _, rest in names if _is_known_by(rest)}
        tracked = self._tracked()
        found = []
        for top in sorted({top for top, slash, _ in names if top and slash}):
            if top in known:
                one = self.look_at(top, now_s)
                is_named = tracked is not None and one.iteration == tracked
                found.append(replace(one, is_named=is_named))
            else:
                found.append(FoundCheckpoint(top, iteration_of(top), Status.OTHER, 0.0))
        return found

    def look_at(self, name: str, now_s: float) -> FoundCheckpoint:
        """See CheckpointDirectory."""
        bucket = self.root.below(name)
        begun = read_begun(visible_place(bucket))
        status = _status(bucket, has_begun=begun is not None)
        age_s = max(0.0, now_s - begun.seconds) if begun is not None else now_s
        return FoundCheckpoint(name, iteration_of(name), status, age_s)

    def lacks_nothing(self, name: str) -> bool:
        """See CheckpointDirectory. By names: a list of them has no sizes."""
        found = scan_format2(self.root.below(name))
        return found is not None and not lacks_files(found.issues)

    def nbytes(self, name: str) -> int | None:
        """See CheckpointDirectory. By the manifest; None where there is none."""
        found = scan_format2(self.root.below(name))
        return None if found is None or found.index is None else found.nbytes

    def remove(self, name: str) -> tuple[str, ...]:
        """See CheckpointDirectory."""
        return remove(self.root.below(name))

    def _tracked(self) -> int | None:
        try:
            return int(self.root.read(TRACKER_NAME))
        except (IncompleteCheckpointError, ValueError):
            return None


def _is_known_by(name: str) -> bool:
    is_begun = name.startswith(SAVE_PREFIX) and name.endswith(SAVE_NAME)
    return is_begun or name in {MARKER_NAME, SAVE_NAME}


def _status(bucket: Bucket, *, has_begun: bool) -> Status:
    place = current_place(bucket)
    marker = marker_or_issue(place)
    if isinstance(marker, CheckpointMarker):
        is_whole = marker.sharded_format == FORMAT2 and _has_index(place)
        return Status.COMPLETE if is_whole else Status.OTHER
    is_unfinished = has_begun and marker.problem is Problem.MISSING_MARKER
    return Status.UNFINISHED if is_unfinished else Status.OTHER


def _has_index(place: Bucket) -> bool:
    try:
        content = place.read(INDEX_NAME)
    except IncompleteCheckpointError:
        return False
    try:
        parse_index(content, place.path(INDEX_NAME))
    except CheckpointError:
        return False
    return True
