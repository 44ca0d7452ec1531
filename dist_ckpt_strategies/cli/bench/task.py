"""What a benchmark asks of its ranks, and who takes part; plain values, light to import."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from dist_ckpt_strategies.errors import CheckpointError

SAVE: Final = "save"
LOAD: Final = "load"
STEPS: Final = (SAVE, LOAD)

FLOOR: Final = "one stream"
CONTENDERS: Final[Mapping[str, str | None]] = MappingProxyType(
    {FLOOR: None, "zarr 1": None, "zarr 2": None, "torch_dist": "psutil"}
)
"""Everyone who takes part, the floor first, and the package that each needs beside ours."""


class BenchError(CheckpointError):
    """The benchmark could not be run."""


@dataclass(frozen=True, slots=True)
class BenchTask:
    """Everything one rank is told when it starts.

    Attributes:
        workspace: directory on the file system that is measured, for this benchmark alone.
        scratch: directory of this start alone: rendezvous, events and failures.
        nbytes: of the whole state, about.
        num_ranks: how many hold equal parts of it.
        repetitions: rounds that count; one more comes first.
        contenders: who takes part.
        timeout_s: longest wait for another rank, in seconds.
    """

    workspace: Path
    scratch: Path
    nbytes: int
    num_ranks: int
    repetitions: int
    contenders: tuple[str, ...]
    timeout_s: float

    @property
    def num_steps(self) -> int:
        """How many saves and loads there will be."""
        return len(STEPS) * len(self.contenders) * (self.repetitions + 1)

    def turns(self) -> Iterator[tuple[int, str]]:
        """Every contender once per round, forwards and backwards in turn; round 0 is not counted.

        What the machine does meanwhile, and what each leaves behind for the next, falls on all.
        """
        for repetition in range(self.repetitions + 1):
            forwards = repetition % 2 == 0
            for name in self.contenders if forwards else reversed(self.contenders):
                yield repetition, name

    def to_json(self) -> str:
        """The task as one JSON object."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> BenchTask:
        """The task that ``to_json`` wrote."""
        found: dict[str, Any] = json.loads(text)
        paths = {name: Path(found[name]) for name in ("workspace", "scratch")}
        return cls(**{**found, **paths, "contenders": tuple(found["contenders"])})


def lacking(names: Sequence[str]) -> dict[str, str]:
    """Contenders that cannot take part here, and the package that each lacks."""
    needed = {name: package for name in names if (package := CONTENDERS[name]) is not None}
    return {
        name: package
        for name, package in needed.items()
        if importlib.util.find_spec(package) is None
    }
