"""Which checkpoints below a root are of the training's present course, and which it has left.

``latest_checkpointed_iteration.txt`` names the checkpoint that was written last, as Megatron-LM has
it. A training that goes back to an earlier step leaves later ones; a second file lists them, and
what it names as written last. If another program has written the first file since, whatever is
newer than it says was left too, and local saves from before then.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dist_ckpt_strategies.storage.bucket import Place, content_of
from dist_ckpt_strategies.storage.files import Directory

logger = logging.getLogger(__name__)

TRACKER_NAME = "latest_checkpointed_iteration.txt"
COURSE_NAME = ".dist-ckpt-course.json"

_NUMBER = re.compile(rb"\s*(\d{1,18})\s*", re.ASCII)

KeepBest = tuple[str, str, int]
"""A metric, "min" or "max", and how many to keep."""

Resumed = tuple[int, str]
"""The iteration that a course went on from, and the time, as stamps of local saves begin."""


@dataclass(frozen=True, slots=True)
class Course:
    """The iteration that was written last if it is known, and those of global checkpoints left.

    ``is_listed``: these are all. Local saves from before it ``resumed``, of later iterations, were
    left. ``keep_best`` is the rule of the manager that saved last.
    """

    newest: int | None = None
    left: frozenset[int] = frozenset()
    is_listed: bool = True
    resumed: Resumed | None = None
    keep_best: KeepBest | None = None

    def has(self, iteration: int) -> bool:
        """Whether a global checkpoint is of the present course."""
        if self.is_listed or self.newest is None or iteration < self.newest:
            return iteration not in self.left
        return iteration == self.newest


def read_course(place: Place) -> Course:
    """The course of a root. What is damaged is not used; without both files nothing was left."""
    newest, listed = None, Course()
    text = content_of(place, TRACKER_NAME)
    if number := _NUMBER.fullmatch(text or b""):
        newest = int(number[1])
    elif text is not None:
        logger.warning("%s/%s: expected an iteration, found %.40r", place, TRACKER_NAME, text)
    try:
        fields = json.loads(content_of(place, COURSE_NAME) or b"{}")
        left, began = frozenset(map(int, fields.get("left", ()))), fields.get("resumed")
        resumed = (int(began[0]), str(began[1])) if began else None
        metric, mode, count = fields.get("keep_best") or ("", "", 0)
        best = (str(metric), str(mode), int(count)) if count else None
        listed = Course(fields.get("newest"), left, resumed=resumed, keep_best=best)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        logger.warning("%s/%s is damaged, and not used", place, COURSE_NAME)
    is_listed = newest in {None, listed.newest}
    if newest is not None and not is_listed and isinstance(place, Directory):
        written_ns = (place.root / TRACKER_NAME).stat().st_mtime_ns
        listed = replace(listed, resumed=(newest, f"{written_ns:016x}"))
    return replace(listed, newest=newest, is_listed=is_listed)


def write_course(place: Place, course: Course) -> None:
    """Write both files, Megatron-LM's first: killed in between, what is newer counts as left."""
    if course.newest is not None:
        place.write(TRACKER_NAME, str(course.newest).encode())
    content = {
        "newest": course.newest,
        "left": sorted(course.left),
        "resumed": course.resumed,
        "keep_best": course.keep_best,
    }
    place.write(COURSE_NAME, json.dumps(content).encode())


def metrics_name(step: int) -> str:
    """The file of a root that has the metrics with which a step was saved."""
    return f".dist-ckpt-metrics-{step:07d}.json"


def write_metrics(place: Place, step: int, metrics: Mapping[str, float]) -> None:
    """Write the metrics of a step; JSON, with NaN and Infinity as Python has them."""
    place.write(metrics_name(step), json.dumps(dict(metrics)).encode())


def read_metrics(place: Place, step: int) -> dict[str, float]:
    """The metrics of a step; empty if there are none. What is damaged is not used."""
    try:
        metrics = json.loads(content_of(place, metrics_name(step)) or b"{}")
        return {str(name): float(value) for name, value in metrics.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        logger.warning("%s/%s is damaged, and not used", place, metrics_name(step))
        return {}
