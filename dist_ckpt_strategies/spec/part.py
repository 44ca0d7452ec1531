"""One rank's part of a local checkpoint, and what its file holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.spec.dtype import DType

_ID = re.compile(r"iter_(\d{7,})_(\d+)_local_([0-9a-f]{1,64})")


@dataclass(frozen=True, slots=True, order=True)
class SaveId:
    """One save of all ranks together; parts of two saves never mix.

    Sorted, the newest save comes last.

    Attributes:
        iteration: the training iteration that was saved.
        token: lower-case hexadecimal digits, led by the time of the save: a run that went back
            saves an iteration again, and its state may differ.
    """

    iteration: int
    token: str


@dataclass(frozen=True, slots=True, order=True)
class PartId:
    """What one rank saved in one save.

    Attributes:
        save: the save it belongs to.
        global_rank: the rank whose state it is, whoever keeps the copy.
    """

    save: SaveId
    global_rank: int

    def __str__(self) -> str:
        """Such as ``iter_0000100_3_local_18f2…``: iteration, rank, token."""
        return f"iter_{self.save.iteration:07d}_{self.global_rank}_local_{self.save.token}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The id that has this text; None if it is none."""
        found = _ID.fullmatch(text)
        if found is None:
            return None
        part = cls(SaveId(int(found[1]), found[3]), int(found[2]))
        return part if str(part) == text else None

    @classmethod
    def require(cls, text: str) -> Self:
        """The id that has this text.

        Raises:
            PlanError: it is none.
        """
        found = cls.parse(text)
        if found is None:
            raise PlanError(
                f"expected the id of a part, such as iter_0000100_3_local_18f2, found {text!r}"
            )
        return found


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """The elements of one tensor or array of a part.

    Attributes:
        name: where it stands in the state, for messages.
        dtype: type of its elements.
        shape: in elements.
        device: the kind of device that a tensor was on, ``cpu`` or ``cuda``; empty for what is
            no tensor, or belongs to an object.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    device: str = "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        found = self.dtype.itemsize
        for extent in self.shape:
            found *= extent
        return found


@dataclass(frozen=True, slots=True)
class Part:
    """A part without its bytes.

    Attributes:
        part_id: the save and the rank.
        world_size: ranks that took part in the save.
        session_id: the training session, as the manager was told.
        kind: name of the encoding of the state that ``content`` is in.
        content: the state without its tensors, of JSON types.
        buffers: the state's tensors in order, then what else of its content is bytes.
    """

    part_id: PartId
    world_size: int
    session_id: str
    kind: str
    content: Any
    buffers: tuple[BufferSpec, ...]
