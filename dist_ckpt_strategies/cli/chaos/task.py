"""What a run with faults does, and what its ranks write down."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dist_ckpt_strategies.cli.chaos.faults import InjectedFault

NUM_RANKS = 4
NUM_SHARDS = 2
PROGRESS_TIMEOUT_S = 5.0
"""A block without a step for so long is stuck."""


@dataclass(frozen=True, slots=True)
class ChaosTask:
    """One run of all ranks.

    Attributes:
        scratch: directory for what they write.
        num_steps: of the training.
        seed: of weights, batches and dropout.
        faults: none for the run that the others are compared with.
        save_every: steps between two checkpoints on the disk; 0: none.
        pause_s: before each fault, in which a spare gets ready.
    """

    scratch: Path
    num_steps: int
    seed: int
    faults: tuple[InjectedFault, ...] = ()
    save_every: int = 0
    pause_s: float = 0.0

    @property
    def events(self) -> Path:
        """Directory of what happened, one file per process."""
        return self.scratch / "events"

    @property
    def fired(self) -> Path:
        """Directory with an empty file for each fault that has happened."""
        return self.scratch / "fired"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints on the disk."""
        return self.scratch / "checkpoints"

    def final(self, global_rank: int) -> Path:
        """File with a rank's digests at the end."""
        return self.scratch / f"final{global_rank}.json"

    def write(self) -> Path:
        """Make the directories, and the file that the ranks read."""
        for directory in (self.events, self.fired, self.checkpoints):
            directory.mkdir(parents=True)
        path = self.scratch / "task.json"
        fields = {
            "num_steps": self.num_steps,
            "seed": self.seed,
            "faults": [fault.to_json() for fault in self.faults],
            "save_every": self.save_every,
            "pause_s": self.pause_s,
        }
        path.write_text(json.dumps(fields), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """What ``write`` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        faults = tuple(InjectedFault.from_json(fault) for fault in fields.pop("faults"))
        return cls(path.parent, faults=faults, **fields)


class EventLog:
    """Lines of JSON that outlive a killed process.

    Args:
        directory: of all processes' files.
        global_rank: of this one.
    """

    def __init__(self, directory: Path, global_rank: int) -> None:
        self._rank = global_rank
        path = directory / f"{global_rank}-{os.getpid()}.jsonl"
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(self, event: str, **fields: Any) -> None:
        """Add a line; whole, and with the time that all processes share."""
        line = {"event": event, "at": time.monotonic(), "rank": self._rank, **fields}
        os.write(self._handle, json.dumps(line).encode() + b"\n")


def read_events(directory: Path) -> list[dict[str, Any]]:
    """The events of all processes, in the order of time."""
    lines = [
        json.loads(line)
        for path in sorted(directory.iterdir())
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(lines, key=lambda line: float(line["at"]))
