"""When a step is saved, which checkpoints are kept, and the other options of a manager."""

import json
import logging
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Self

from dist_ckpt_strategies.core.report import SaveMetrics
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.course import KeepBest
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.manager.candidates import Tier
from dist_ckpt_strategies.storage.io_pool import WORK
from dist_ckpt_strategies.strategies.registry import StrategyChoice
from dist_ckpt_strategies.tools.prune import require_keep_best

logger = logging.getLogger(__name__)

_LEASE_S = 60.0

_POSITIVE = {
    "every_steps": (Integral, "whole number"),
    "every_minutes": (Real, "number"),
    "local_every_steps": (Integral, "whole number"),
    "keep_last": (Integral, "whole number"),
    "keep_every": (Integral, "whole number"),
}


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When a step is saved, and which global checkpoints are kept.

    If both tiers are due, only the global one is saved.

    Attributes:
        every_steps: save every multiple of this step number globally.
        every_minutes: save globally once so many minutes have passed since the last global save,
            by the clock of rank 0.
        local_every_steps: save every multiple of this step number locally.
        keep_last: number of newest global checkpoints to keep; None: all.
        keep_every: with one of the other two ``keep_``, also keep those whose step is a multiple.
        keep_best: ``("loss", "min", 3)``: also keep the 3 with the least ``loss``, of the
            ``metrics`` of their saves; or ``"max"`` for the greatest. Without ``keep_last``, only
            these and the newest are kept. NaN and missing metrics are no best; of equal ones the
            newest is.
        should_save: function that is asked once in each ``save`` without ``force``, on all ranks,
            besides the numbers above: given the step, it returns whether to save globally, or a
            tier, ``"local"`` or ``"global"``. The answer of the first rank counts; it logs one line
            if others differ. The answers travel in the poll, which is then made in each step, and
            waited for.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    local_every_steps: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None
    should_save: Callable[[int], bool | str | None] | None = None

    def __post_init__(self) -> None:
        """Refuse what could only fail at a later step."""
        for name, (kind, expected) in _POSITIVE.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, kind) and float(value) > 0):
                raise PlanError(f"{name}: expected a {expected} above 0, found {value!r}")
        if self.keep_best is not None:
            require_keep_best(self.keep_best)
        if self.keep_every and not (self.keep_last or self.keep_best):
            raise PlanError("keep_every: expected with keep_last; without it, all are kept")
        if self.should_save is not None and not callable(self.should_save):
            raise PlanError(f"should_save: expected a function, found {self.should_save!r}")

    def due(self, step: int) -> Tier | None:
        """The tier that is due at a step, without regard to ``every_minutes``; None: none."""
        if self.every_steps and step % self.every_steps == 0:
            return Tier.GLOBAL
        if self.local_every_steps and step % self.local_every_steps == 0:
            return Tier.LOCAL
        return None

    def asked(self, step: int, tiers: Collection[Tier]) -> Tier | None:
        """The tier that ``should_save`` names for a step, of those that there are; None: none."""
        answer = self.should_save(step) if self.should_save is not None else None
        if not isinstance(answer, str):
            return Tier.GLOBAL if answer else None
        if answer not in {Tier.LOCAL, Tier.GLOBAL}:
            raise PlanError(f"should_save: expected a bool, 'local' or 'global', found {answer!r}")
        if answer not in tiers:
            raise PlanError(f"should_save: the {answer} tier is due, and the manager has none")
        return Tier(answer)


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Options of a TieredCheckpointManager. Equal on all ranks.

    Attributes:
        strategy: of global saves: ("safetensors", 1) by default, ("zarr", 1), or an instance.
        load_strategy: strategy of global loads; by default the one that the checkpoint names.
        allow: further classes that objects of the state may have.
        is_async: ``save`` returns while the state is written in the background; False: it waits.
        timeout_s: longest wait for a peer; by default that of the environment.
        on_unchanged: see ``save``; of global saves. The local manager has its own.
        poll_every_steps: at multiples of this step number, one small gather finds out whether a
            signal has arrived, ``every_minutes`` have passed, or a save has ended. There is no
            gather if none of these is possible; with ``should_save`` there is one in each step.
        preemption_signals: after one of these signals on any rank, the next poll saves the state,
            and every rank raises SystemExit. Handled in the main thread.
        exit_code: exit code of that SystemExit; ``dist-ckpt run`` takes all but 143 for a death.
        lease_s: seconds without a renewal after which the next job may take over the root;
            by default 60, or a quarter of ``timeout_s`` if that is less.
        metrics: function that rank 0 calls with the SaveMetrics of each save, load, skip and
            failure, or a file to which it appends them, one line of JSON each. If this fails, the
            failure is logged.
    """

    strategy: StrategyChoice = None
    load_strategy: StrategyChoice = None
    allow: Allowed = ()
    is_async: bool = True
    timeout_s: float | None = None
    on_unchanged: str | None = None
    poll_every_steps: int = 1
    preemption_signals: tuple[int, ...] = (signal.SIGTERM,)
    exit_code: int = 128 + signal.SIGTERM
    lease_s: float | None = None
    metrics: Callable[[SaveMetrics], None] | str | Path | None = None

    def anchored(self) -> Self:
        """The same, for good: the script may change its directory."""
        if self.metrics is None or callable(self.metrics):
            return self
        return replace(self, metrics=Path(self.metrics).absolute())

    def limits(self, default_s: float) -> tuple[float, float]:
        """``timeout_s`` and ``lease_s`` as they apply; a PlanError if they make no sense."""
        timeout_s = self.timeout_s or default_s
        lease_s = min(_LEASE_S, timeout_s / 4) if self.lease_s is None else self.lease_s
        if not (self.poll_every_steps >= 1 and 0 < lease_s < WORK * timeout_s):
            raise PlanError(
                f"options: expected poll_every_steps >= 1 and 0 < lease_s < {WORK:g} * timeout_s, "
                f"found {self.poll_every_steps}, {lease_s:g} and {timeout_s:g}"
            )
        return timeout_s, lease_s

    def report(self, event: SaveMetrics) -> None:
        """Log an event, and give it to the caller. Rank-local, on rank 0."""
        event, sink = replace(event, unix_s=time.time()), self.metrics
        logger.info("%s: %s", event.kind, event)
        try:
            if callable(sink):
                sink(event)
            elif sink is not None:
                with Path(sink).open("a") as file:
                    file.write(json.dumps(asdict(event)) + "\n")
        except Exception:  # the caller's; one rank must not leave the others
            logger.exception("the metrics of the %s of step %d", event.kind, event.step)


def schedule_of(policy: SavePolicy, options: ManagerOptions) -> dict[str, int | bool | None]:
    """What decides in which steps ranks meet: three numbers, and whether there is the rest."""
    return {
        "every_steps": policy.every_steps and int(policy.every_steps),
        "local_every_steps": policy.local_every_steps and int(policy.local_every_steps),
        "poll_every_steps": int(options.poll_every_steps),
        "every_minutes": policy.every_minutes is not None,
        "should_save": policy.should_save is not None,
        "preemption_signals": bool(options.preemption_signals),
    }


def require_one_schedule(schedules: Sequence[Mapping[str, object]]) -> None:
    """Raise a PlanError unless all ranks would meet in the same steps."""
    for name, value in schedules[0].items():
        for rank, schedule in enumerate(schedules):
            if schedule[name] != value:
                raise PlanError(
                    f"{name}: expected the same on all ranks, found {value} on rank 0 and "
                    f"{schedule[name]} on rank {rank}; give all the same SavePolicy and "
                    "ManagerOptions"
                )


def whole_step(step: object) -> int:
    """The step as an int; a PlanError if it is no number of steps done."""
    if not (isinstance(step, Integral) and int(step) >= 0):
        raise PlanError(f"step: expected the number of steps done, found {step!r}")
    return int(step)


def require_same(steps: Sequence[object]) -> None:
    """Raise a PlanError unless all ranks have the same step."""
    if len(set(steps)) > 1:
        raise PlanError(f"step: expected the same on all ranks, found {[*steps]} on ranks 0, 1, …")


def numbers_of(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """The metrics of a step as plain numbers; a PlanError if they are none."""
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"metrics: expected numbers by name, found {metrics!r}: {error}") from error
