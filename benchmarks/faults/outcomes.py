"""How saves and loads end on a rank, for whoever judges them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dist_ckpt_strategies.errors import CheckpointError, kind_of


class Ending(StrEnum):
    """How a save or a load ended on a rank."""

    SAVED = "saved"
    LOADED = "loaded"
    REFUSED = "refused"
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save or a load ended on a rank.

    Attributes:
        ending: which way.
        iteration: that was saved or loaded; -1 where none was.
        text: the error's kind and message, or what is different.
    """

    ending: Ending
    iteration: int = -1
    text: str = ""


def refused(error: CheckpointError) -> Outcome:
    """What this package has refused to do."""
    return Outcome(Ending.REFUSED, text=f"{kind_of(error)}: {error}")
