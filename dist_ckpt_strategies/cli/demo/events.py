"""What a rank of the demonstration, or of the benchmark, reports while it works: events.

One JSON object per line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EVENTS_NAME = "events.jsonl"

TRAIN = "train"
TRAIN_ON = "train on"
SAVE = "save"
SAVE_LOCALLY = "save locally"
LOAD = "load"
RESUME = "resume"
GOLDEN = "load golden"


@dataclass(frozen=True, slots=True)
class PhaseBegun:
    """A phase has begun.

    Attributes:
        name: what is done in it.
        num_iterations: training iterations in it, None where it has none.
    """

    name: str
    num_iterations: int | None = None


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """A phase is over.

    Attributes:
        name: as in PhaseBegun.
        seconds: what it took.
    """

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class IterationDone:
    """One training iteration is over; ``loss`` is the mean over all ranks, before its change."""

    iteration: int
    loss: float


@dataclass(frozen=True, slots=True)
class DigestsTaken:
    """The digest of every global tensor, by key, in hexadecimal."""

    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class GoldenCompared:
    """The golden checkpoint was loaded into a model.

    Attributes:
        num_arrays: global tensors compared with the expected ones.
        differing: keys of those that are not bit-identical.
    """

    num_arrays: int
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadingShared:
    """The ranks of a data-parallel group have loaded together.

    Attributes:
        read_nbytes: bytes that each of them read from storage.
        filled_nbytes: bytes that each of them now has of the checkpoint.
    """

    read_nbytes: tuple[int, ...]
    filled_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepTimed:
    """A save or load of ``dist-ckpt bench`` is over.

    Attributes:
        step: what it was.
        contender: whose.
        repetition: number of the round; 0 does not count.
        seconds: from the first rank's start to the last rank's end.
        nbytes: of all ranks.
        num_arrays: of the state.
    """

    step: str
    contender: str
    repetition: int
    seconds: float
    nbytes: int
    num_arrays: int


Event = (
    PhaseBegun
    | PhaseEnded
    | IterationDone
    | DigestsTaken
    | GoldenCompared
    | ReadingShared
    | StepTimed
)

_CLASSES: Mapping[str, Callable[..., Event]] = {
    known.__name__: known
    for known in (
        *(PhaseBegun, PhaseEnded, IterationDone),
        *(DigestsTaken, GoldenCompared, ReadingShared, StepTimed),
    )
}


class EventWriter:
    """Appends events to a file; a writer without a file drops them, so that one rank reports."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        """Add one event; a reader never sees half of it as a line."""
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({type(event).__name__: asdict(event)}) + "\n")


class EventReader:
    """Follows a file of events that another process is writing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._byte_offset = 0

    def read(self) -> Iterator[Event]:
        """Events that are complete and were not returned before."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._byte_offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._byte_offset += len(line)
                yield _from_json(line)


def _from_json(line: bytes) -> Event:
    found: dict[str, dict[str, Any]] = json.loads(line)
    ((name, values),) = found.items()
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return _CLASSES[name](**fields)
