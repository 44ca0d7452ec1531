"""What a save or load did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One rank's share of a save.

    Attributes:
        num_arrays: arrays whose metadata this rank wrote.
        num_chunks: chunk files it wrote.
        nbytes: payload bytes it wrote.
        moved_nbytes: bytes it sent to the writers of other chunks.
        seconds: wall time of the whole save, waiting for peers included.
    """

    num_arrays: int
    num_chunks: int
    nbytes: int
    moved_nbytes: int
    seconds: float

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.num_chunks} chunks and {self.nbytes} bytes written, "
            f"{self.moved_nbytes} bytes sent to other writers, in {self.seconds:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class GroupReport:
    """All ranks' shares of a load that they shared.

    Attributes:
        shares: the report of each rank, by rank of the group.
    """

    shares: tuple[BroadcastReport, ...]

    def __str__(self) -> str:
        """Largest and mean of each figure, over the ranks."""
        lines = []
        for name, unit in _FIGURES.items():
            values = [float(getattr(share, name)) for share in self.shares]
            mean = sum(values) / len(values)
            lines.append(f"{name} max {max(values):.{unit}f} mean {mean:.{unit}f}")
        return f"{len(self.shares)} ranks: " + ", ".join(lines)


_FIGURES = {
    "read_nbytes": 0,
    "received_nbytes": 0,
    "reading_s": 3,
    "sending_s": 3,
    "seconds": 3,
}
"""What a GroupReport sums up, and with how many decimals."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One rank's share of a load.

    Attributes:
        num_tensors: tensors that were filled.
        nbytes: bytes read from storage.
        seconds: wall time, not waiting for peers.
    """

    num_tensors: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        """One line for a log."""
        return f"{self.num_tensors} tensors, {self.nbytes} bytes read in {self.seconds:.3f} s"


@dataclass(frozen=True, slots=True)
class BroadcastReport:
    """One rank's share of a load that a group shares.

    Attributes:
        num_tensors: tensors that were filled.
        read_nbytes: bytes that this rank read from storage.
        received_nbytes: bytes that it received from others.
        reading_s: seconds spent waiting for reads, its own and, in the meetings, those of others.
        sending_s: seconds spent sending, receiving and copying into place.
        seconds: wall time.
    """

    num_tensors: int
    read_nbytes: int
    received_nbytes: int
    reading_s: float
    sending_s: float
    seconds: float

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.num_tensors} tensors, {self.read_nbytes} bytes read, {self.received_nbytes} "
            f"received in {self.seconds:.3f} s (waiting for reads {self.reading_s:.3f} s, "
            f"sending {self.sending_s:.3f} s)"
        )
