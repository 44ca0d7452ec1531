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


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One rank's share of a load.

    Attributes:
        num_tensors: tensors that were filled.
        nbytes: bytes read from storage.
        seconds: wall time, waiting for peers included.
    """

    num_tensors: int
    nbytes: int
    seconds: float
