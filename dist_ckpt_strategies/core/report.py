"""Numbers that saves and loads report."""

from dataclasses import dataclass, fields
from typing import Any


def figures(report: Any) -> str:
    """The figures of a report in one line, for a log."""
    named = ((field.name, getattr(report, field.name)) for field in fields(report))
    return ", ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in named
        if value != ""
    )


@dataclass(frozen=True, slots=True)
class SaveMetrics:
    """One save, load, skip or failure of a TieredCheckpointManager, of all ranks.

    Times of a save are those of the slowest rank, others those of rank 0. What does not apply is 0.

    Attributes:
        step: training step; -1 for a load that failed and was not of one step.
        tier: ``"local"``, ``"global"`` or ``"memory"``; empty if a load failed.
        waited_s: seconds that training waited for the previous save.
        blocking_s: seconds that this save or load blocked training.
        background_s: seconds that it was written in the background.
        nbytes: bytes written by all ranks together; for a local save without the copies.
        gb_per_s: ``nbytes`` in 1e9 bytes, divided by ``blocking_s + background_s``.
        unix_s: time when it was complete, in seconds since the epoch.
        kind: ``"save"`` is visible now; ``"load"``; ``"skip"``: a local save was due, and another
            save still ran; ``"failure"`` of a save or a load.
        reason: of a skip or failure; of a load, which checkpoints were refused before, and why.
    """

    step: int
    tier: str
    waited_s: float
    blocking_s: float
    background_s: float = 0.0
    nbytes: int = 0
    gb_per_s: float = 0.0
    unix_s: float = 0.0
    kind: str = "save"
    reason: str = ""

    __str__ = figures


@dataclass(frozen=True, slots=True)
class BroadcastReport:
    """One rank's share of a load that a group shares.

    Attributes:
        num_tensors: tensors that were filled.
        filled_nbytes: their bytes, as far as storage has something for them.
        read_nbytes: bytes that this rank read from storage.
        received_nbytes: bytes that it received from others.
        reading_s: seconds spent waiting for its own reads.
        sending_s: seconds spent waiting for messages.
        copying_s: seconds spent copying into place, and to the device.
        waiting_s: seconds spent waiting for other ranks at error checks.
        seconds: wall time of the transfer, all of these included.
    """

    num_tensors: int
    filled_nbytes: int
    read_nbytes: int
    received_nbytes: int
    reading_s: float
    sending_s: float
    copying_s: float
    waiting_s: float
    seconds: float

    __str__ = figures


@dataclass(frozen=True, slots=True)
class GroupReport:
    """All ranks' shares of a load that they shared.

    Attributes:
        shares: the report of each rank, by rank of the group.
    """

    shares: tuple[BroadcastReport, ...]

    def __str__(self) -> str:
        """Largest and mean of each figure, over the ranks."""
        texts = []
        for field in fields(BroadcastReport):
            values = [getattr(share, field.name) for share in self.shares]
            form = ".3f" if isinstance(values[0], float) else ".0f"
            most, mean = float(max(values)), sum(values) / len(values)
            texts.append(f"{field.name} max {most:{form}} mean {mean:{form}}")
        return f"{len(self.shares)} ranks: " + ", ".join(texts)


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """One rank's share of a recovery from the memory of others.

    Attributes:
        step: that is run next, on all ranks.
        role: what became of this rank's state: ``keep``, ``finish step`` or ``receive``.
        sources: ranks that it received from.
        received_nbytes: payload bytes that it received.
        sent_nbytes: payload bytes that it sent.
        copied_nbytes: bytes copied from its own old tensors to new ones.
        gathered: whether the weights were gathered from the shards.
        seconds: wall time, waiting for peers included.
    """

    step: int
    role: str
    sources: tuple[int, ...]
    received_nbytes: int
    sent_nbytes: int
    copied_nbytes: int
    gathered: bool
    seconds: float

    __str__ = figures
