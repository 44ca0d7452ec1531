"""What a save or load did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields


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

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.num_tensors} tensors, {self.read_nbytes} bytes read, {self.received_nbytes} "
            f"received in {self.seconds:.3f} s (waiting for reads {self.reading_s:.3f} s, for "
            f"bytes under way {self.sending_s:.3f} s, for copies {self.copying_s:.3f} s, for "
            f"other ranks {self.waiting_s:.3f} s)"
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
        found = []
        for field in fields(BroadcastReport):
            values = [getattr(share, field.name) for share in self.shares]
            form = ".3f" if isinstance(values[0], float) else ".0f"
            most, mean = float(max(values)), sum(values) / len(values)
            found.append(f"{field.name} max {most:{form}} mean {mean:{form}}")
        return f"{len(self.shares)} ranks: " + ", ".join(found)


@dataclass(frozen=True, slots=True)
class ReplicationReport:
    """One rank's share of a local save.

    Attributes:
        num_parts: parts that this rank has written: its own and those of its peers.
        own_nbytes: size of its own part's file.
        received_nbytes: sizes of its peers' files.
        seconds: wall time, waiting for peers included.
    """

    num_parts: int
    own_nbytes: int
    received_nbytes: int
    seconds: float

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.num_parts} parts written, {self.own_nbytes} bytes of its own and "
            f"{self.received_nbytes} of peers, in {self.seconds:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class RetrievalReport:
    """One rank's share of a local load.

    Attributes:
        num_parts: parts that it wanted and got.
        read_nbytes: bytes that it read from its node's disk, for itself and for others.
        received_nbytes: sizes of the parts that came from other ranks.
        seconds: wall time, waiting for peers included.
    """

    num_parts: int
    read_nbytes: int
    received_nbytes: int
    seconds: float

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.num_parts} parts, {self.read_nbytes} bytes read and {self.received_nbytes} "
            f"received in {self.seconds:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """One rank's share of a recovery from the memory of others.

    Attributes:
        step: that is run next, on all ranks.
        role: what became of this rank's state: ``keep``, ``roll forward`` or ``receive``.
        sources: ranks that it received from.
        received_nbytes: payload bytes that it received.
        sent_nbytes: payload bytes that it sent.
        copied_nbytes: bytes copied from its own old tensors to new ones.
        gathered: whether the weights were made anew from the shards.
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

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"step {self.step}: {self.role}; {self.received_nbytes} bytes received from ranks "
            f"{list(self.sources)}, {self.sent_nbytes} sent, {self.copied_nbytes} copied, in "
            f"{self.seconds:.3f} s"
        )
