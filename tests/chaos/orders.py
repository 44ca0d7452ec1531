"""What the ranks are told to do, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.oracle import Tier
from tests.chaos.traps import Trap
from tests.support.entries import Failure


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin the training anew, at step 0."""


@dataclass(frozen=True, slots=True)
class Join:
    """Make process groups with the others, those of an earlier meeting are given up.

    Attributes:
        meeting: tells it from others.
        jump: the ranks between a part and its copy.
        timeout_s: for meetings of the training.
    """

    meeting: str
    jump: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """A save in the training.

    Attributes:
        tier: which kind.
        after_steps: how many steps come before it.
        is_async: whether training goes on meanwhile.
        directory: where to, of a global one.
    """

    tier: Tier
    after_steps: int
    is_async: bool
    directory: str = ""


@dataclass(frozen=True, slots=True)
class Train:
    """Train, and save on the way.

    Attributes:
        steps: how many.
        saves: in order.
        timeout_s: of every wait for a peer, in a step and in a save.
        trap: of this rank.
    """

    steps: int
    saves: tuple[SaveOrder, ...]
    timeout_s: float
    trap: Trap | None = None


@dataclass(frozen=True, slots=True)
class Recover:
    """Forget everything, and load the newest checkpoint.

    Attributes:
        places: of global checkpoints.
        timeout_s: of every wait.
        trap: of this rank.
    """

    places: tuple[str, ...]
    timeout_s: float
    trap: Trap | None = None


Order = Begin | Join | Train | Recover


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended.

    Attributes:
        order: the save.
        iteration: of the training.
        failure: what was raised.
    """

    order: SaveOrder
    iteration: int
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Trained:
    """The answer to Train.

    Attributes:
        digests: of the state, by step.
        saves: how the saves ended, of those that were begun.
        failure: what ended the training early; not what a save raised.
        has_sprung: whether the trap did.
    """

    digests: dict[int, str]
    saves: tuple[SaveResult, ...]
    failure: Failure | None
    has_sprung: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """The answer to Recover.

    Attributes:
        tier: where the checkpoint was.
        iteration: of the training, as the package says.
        name: of the checkpoint.
        attempts: what was passed over, and why.
        digest: of the state.
        failure: what was raised in place of all that.
        has_sprung: whether the trap did.
        is_loaded: whether the load had ended well before the failure.
    """

    tier: Tier | None
    iteration: int
    name: str
    attempts: tuple[str, ...]
    digest: str
    failure: Failure | None
    has_sprung: bool
    is_loaded: bool = False
