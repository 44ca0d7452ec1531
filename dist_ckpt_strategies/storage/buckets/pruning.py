"""A place in an object store that holds many checkpoints, and how one of them goes. No torch.

An object store does not tell when an object was written: the age of a checkpoint is that of the
first object of its save, which says when it began.
"""

from __future__ import annotations

from dist_ckpt_strategies.errors import CheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.plan.prune import FoundCheckpoint, Standing
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.buckets.bucket import Bucket
from dist_ckpt_strategies.storage.buckets.files import read_marker_or_finding
from dist_ckpt_strategies.storage.buckets.publication import remove, require_something
from dist_ckpt_strategies.storage.conversion.journal import JOURNAL_NAME
from dist_ckpt_strategies.storage.disk.files import MARKER_NAME
from dist_ckpt_strategies.storage.findings import Problem, lacks_files
from dist_ckpt_strategies.storage.format2.files import FORMAT2, read_begun, sharded_format
from dist_ckpt_strategies.storage.format2.manifest import INDEX_NAME, SAVE_NAME, parse_index
from dist_ckpt_strategies.storage.format2.survey import survey_format2
from dist_ckpt_strategies.storage.lifecycle.pruning import TRACKER_NAME, iteration_of


class BucketShelf:
    """Checkpoints below a URL; see Shelf. Takes memory for the names of all their objects.

    Args:
        root: holds the checkpoints.
    """

    def __init__(self, root: Bucket) -> None:
        self.root = root

    def find(self, now_s: float) -> list[FoundCheckpoint]:
        """See Shelf. One list of all names below, and a few requests for each checkpoint."""
        names = [name.partition("/") for name in self.root.names("")]
        if not names:
            require_something(self.root)
        known = {top for top, _, rest in names if rest in {MARKER_NAME, SAVE_NAME}}
        tracked = self._tracked()
        return [
            self._look_at(top, now_s, tracked)
            if top in known
            else FoundCheckpoint(top, iteration_of(top), Standing.OTHER, 0.0)
            for top in sorted({top for top, slash, _ in names if top and slash})
        ]

    def look_at(self, name: str, now_s: float) -> FoundCheckpoint:
        """See Shelf."""
        return self._look_at(name, now_s, None)

    def is_whole(self, name: str) -> bool:
        """See Shelf. By names: a list of them has no sizes."""
        survey = survey_format2(self.root.below(name))
        return survey is not None and not lacks_files(survey.findings)

    def nbytes(self, name: str) -> int | None:
        """See Shelf. By the manifest; None where there is none."""
        survey = survey_format2(self.root.below(name))
        return None if survey is None or survey.index is None else survey.nbytes

    def remove(self, name: str) -> tuple[str, ...]:
        """See Shelf."""
        return remove(self.root.below(name))

    def _look_at(self, name: str, now_s: float, tracked: int | None) -> FoundCheckpoint:
        place, iteration = self.root.below(name), iteration_of(name)
        begun = read_begun(place)
        standing = _standing(place, is_ours=begun is not None)
        age_s = max(0.0, now_s - begun.seconds) if begun is not None else now_s
        is_named = tracked is not None and iteration == tracked
        return FoundCheckpoint(name, iteration, standing, age_s, is_named)

    def _tracked(self) -> int | None:
        try:
            return int(self.root.read(TRACKER_NAME))
        except (IncompleteCheckpointError, ValueError):
            return None


def _standing(place: Bucket, *, is_ours: bool) -> Standing:
    marker = read_marker_or_finding(place)
    if isinstance(marker, CheckpointMarker):
        is_whole = sharded_format(marker) == FORMAT2 and _has_index(place)
        return Standing.COMPLETE if is_whole else Standing.OTHER
    is_resumable = any(True for _ in place.names(JOURNAL_NAME))
    if marker.problem is not Problem.MISSING_MARKER or is_resumable:
        return Standing.OTHER
    return Standing.UNFINISHED if is_ours else Standing.OTHER


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
