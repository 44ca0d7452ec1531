"""A run: training, events and recoveries one after the other, and everything compared."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dist_ckpt_strategies.tools.prune import prune
from tests.chaos import judge
from tests.chaos.bookkeeping import observed_copies, observed_global
from tests.chaos.damage import small_disk
from tests.chaos.judge import LOSSES, Reference
from tests.chaos.local_files import local_copies
from tests.chaos.oracle import Ledger, Tier
from tests.chaos.orders import Begin, Order, Recover, Recovered, SaveOrder, Train, Trained
from tests.chaos.rank import NUM_KEPT, undisturbed
from tests.chaos.schedule import (
    HANGS,
    MAX_STEPS,
    NUM_RANKS,
    During,
    Event,
    Kind,
    SaveAt,
    Store,
    Survivors,
    build_schedule,
)
from tests.chaos.sites import ObjectServer, checkpoint_at
from tests.chaos.strikes import MAX_NAP_S, Strikes, trap_of
from tests.chaos.traps import Trap
from tests.chaos.world import Answer, Gone, Stopped, StuckError, World
from tests.support.ranks import run_processes

TIMEOUT_S = 60.0
"""More than the machine may stand still for, and than a store is given to answer."""

SHORT_TIMEOUT_S = 2.5
"""Of waits for peers while one falls silent."""

_NUM_GLOBAL_KEPT = 4
_ANSWER_SLACK_S = 60.0


class ViolationError(Exception):
    """Something that must never happen did."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is asked for.

    Attributes:
        seed: of the schedule.
        num_events: that have to happen.
        stores: where global checkpoints go, in turn.
    """

    seed: int
    num_events: int
    stores: tuple[Store, ...] = tuple(Store)

    def __str__(self) -> str:
        """How to repeat it."""
        names = " ".join(f"--store {store}" for store in self.stores)
        return f"python -m tests.chaos --seed {self.seed} --events {self.num_events} {names}"


@dataclass(slots=True)
class Tally:
    """What has happened.

    Attributes:
        events: by kind.
        ends: what recoveries brought, by event and tier.
        num_started: processes.
        seconds: of the whole run.
    """

    events: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    num_started: int = 0
    seconds: float = 0.0


class Run:
    """The state of a run, as the driver knows it."""

    def __init__(
        self,
        world: World,
        strikes: Strikes,
        reference: Reference,
    ) -> None:
        self._world = world
        self._strikes = strikes
        self._reference = reference
        self._ledger = Ledger(NUM_RANKS, NUM_KEPT)
        self._step = 0
        self._jump = 1
        self.tally = Tally()

    def start(self) -> None:
        """Start the ranks at step 0."""
        self._world.meet(self._jump)
        self._begin()

    def happen(self, event: Event) -> bool:
        """Train, let the event happen, and recover; whether it did happen.

        Raises:
            ViolationError: something went as it must not.
        """
        during_save = event.during is During.SAVE
        answers = self._train(event if during_save else None, event)
        has_happened = not during_save or self._has_struck(event, answers)
        if during_save:
            self._mend(event, answers)
        if event.during is During.NOTHING:
            damaged = self._strikes.damaged(event, self._ledger)
            has_happened = damaged is not None
            self._ledger = damaged or self._ledger
        elif event.during is During.LOAD:
            answers = self._recover_disturbed(event)
            has_happened = self._has_struck(event, answers)
            self._mend(event, answers)
        self._recover(event)
        self._remove_old()
        if has_happened:
            self.tally.events[event.kind] += 1
        return has_happened

    def finish(self) -> None:
        """Train a little longer, undisturbed."""
        answers = self._ask(Train(MAX_STEPS, (), TIMEOUT_S), TIMEOUT_S)
        _require(judge.check_steps(answers, self._reference))
        _require(judge.check_training(None, answers, TIMEOUT_S))
        self.tally.num_started = self._world.num_started

    def _train(self, striking: Event | None, event: Event) -> dict[int, Answer]:
        timeout_s = SHORT_TIMEOUT_S if striking and striking.kind in LOSSES else TIMEOUT_S
        saves = tuple(self._saves(event))
        orders: dict[int, Order] = {
            rank: Train(event.steps, saves, timeout_s, self._trap(striking, rank))
            for rank in range(NUM_RANKS)
        }
        before = self._ledger
        with self._strikes.from_outside(striking):
            answers = self._ask_each(orders, striking, timeout_s)
        self._observe(answers, before, striking)
        _require(judge.check_steps(answers, self._reference))
        _require(judge.check_training(striking, answers, timeout_s))
        return answers

    def _saves(self, event: Event) -> Iterator[SaveOrder]:
        """Those of the training before an event, in the order of their steps."""
        address = self._strikes.site(event).address

        def order(tier: Tier, save: SaveAt) -> SaveOrder:
            where = checkpoint_at(address, self._step + save.after_steps)
            directory = where if tier is Tier.GLOBAL else ""
            return SaveOrder(tier, save.after_steps, save.is_async, directory)

        if event.global_save is not None:
            yield order(Tier.GLOBAL, event.global_save)
        if event.local_save is not None:
            yield order(Tier.LOCAL, event.local_save)

    def _recover_disturbed(self, event: Event) -> dict[int, Answer]:
        timeout_s = SHORT_TIMEOUT_S if event.kind in LOSSES else TIMEOUT_S
        orders: dict[int, Order] = {
            rank: Recover(self._places(), timeout_s, self._trap(event, rank))
            for rank in range(NUM_RANKS)
        }
        with self._strikes.from_outside(event):
            answers = self._ask_each(orders, event, timeout_s)
        expected = self._ledger
        if event.kind is Kind.LOSE_NODE:
            self._ledger = self._ledger.with_copies(local_copies(self._strikes.root))
        if event.kind is Kind.EMPTIED:
            gone = [name for name in self._ledger.global_ if "://" in name]
            self._ledger = self._ledger.without_global(gone)
        _require(
            judge.check_disturbed_recovery(event, answers, expected, self._reference, timeout_s)
        )
        return answers

    def _recover(self, event: Event) -> None:
        """The newest whole checkpoint, or the beginning where there is none."""
        answers = self._ask(Recover(self._places(), TIMEOUT_S), TIMEOUT_S)
        _require(judge.check_recovery(answers, self._ledger, self._reference))
        found = answers[0].value
        assert isinstance(found, Recovered)
        self.tally.ends[f"{event.kind}: {found.tier or 'the beginning'}"] += 1
        if found.tier is None:
            self._begin()
        else:
            self._step = found.iteration

    def _begin(self) -> None:
        answers = self._ask(Begin(), TIMEOUT_S)
        digests = {rank: answer.value for rank, answer in answers.items()}
        if any(digest != self._reference[rank][0] for rank, digest in digests.items()):
            raise ViolationError(f"the beginning is another one: {digests}")
        self._step = 0

    def _ask(self, order: Order, timeout_s: float) -> dict[int, Answer]:
        return self._ask_each(dict.fromkeys(range(NUM_RANKS), order), None, timeout_s)

    def _ask_each(
        self, orders: Mapping[int, Order], event: Event | None, timeout_s: float
    ) -> dict[int, Answer]:
        nap_s = event.share * MAX_NAP_S if event and event.kind is Kind.PAUSE else None
        try:
            answers = self._world.ask(orders, 2 * timeout_s + _ANSWER_SLACK_S, nap_s=nap_s)
            if event is not None and event.kind is Kind.WAKE:
                for rank, answer in answers.items():
                    if isinstance(answer.value, Stopped):
                        answers[rank] = self._world.wake(rank, 2 * TIMEOUT_S + _ANSWER_SLACK_S)
        except StuckError as error:
            raise ViolationError(f"a hang: {error}") from error
        return answers

    def _mend(self, event: Event, answers: Mapping[int, Answer]) -> None:
        """See that all ranks are there, and in touch with each other."""
        lost = [rank for rank, a in answers.items() if isinstance(a.value, (Gone, Stopped))]
        if not lost and event.kind not in HANGS:
            return
        self._world.kill(*(lost if event.survivors is Survivors.STAY else answers))
        self._jump = event.jump
        try:
            self._world.meet(self._jump)
        except StuckError as error:
            raise ViolationError(str(error)) from error

    def _has_struck(self, event: Event, answers: Mapping[int, Answer]) -> bool:
        """Whether the event was there for anybody to see."""
        if event.kind in {Kind.RESTART, Kind.EMPTIED, Kind.LOSE_NODE} | LOSSES:
            return True
        results = [answer.value for answer in answers.values()]
        if event.kind in {Kind.FULL, Kind.LIMIT}:
            saves = [one for r in results if isinstance(r, Trained) for one in r.saves]
            return any(one.failure for one in saves)
        return any(r.has_sprung for r in results if isinstance(r, (Trained, Recovered)))

    def _observe(self, answers: Mapping[int, Answer], before: Ledger, event: Event | None) -> None:
        """Note what the saves have left, and that nothing else has changed."""
        saves = judge.saves_by_order(answers)
        is_emptied = event is not None and event.kind is Kind.EMPTIED
        finished: dict[str, int] = {}
        for site in self._strikes.sites():
            finished |= site.finished()
        if is_emptied:
            gone = [name for name in before.global_ if "://" in name]
            before = before.without_global(gone)
        is_lost = event is not None and event.kind in LOSSES | {Kind.EMPTIED}
        ledger, wrong = observed_global(before, saves, finished, may_differ=is_lost)
        self._ledger, more = observed_copies(
            ledger,
            saves,
            local_copies(self._strikes.root),
            self._jump,
            may_differ=is_lost,
            lost_node=event.victim if event and event.kind is Kind.LOSE_NODE else None,
        )
        _require([*wrong, *more])

    def _remove_old(self) -> None:
        """Keep the number of global checkpoints small."""
        disk, server = self._strikes.disk, self._strikes.server
        if len(list(disk.root.glob("iter_*"))) > 2 * _NUM_GLOBAL_KEPT:
            prune(disk.root, keep_last=_NUM_GLOBAL_KEPT, unfinished=True, older_than_s=0)
            gone = set(self._ledger.global_) - set(disk.finished())
            self._ledger = self._ledger.without_global(n for n in gone if "://" not in n)
        stored = sorted((i, n) for n, (i, _) in self._ledger.global_.items() if "://" in n)
        if server is not None and len(stored) > 2 * _NUM_GLOBAL_KEPT:
            for _, name in stored[:-_NUM_GLOBAL_KEPT]:
                server.site.remove(name)
                self._ledger = self._ledger.without_global([name])

    def _trap(self, event: Event | None, rank: int) -> Trap | None:
        return trap_of(event, rank, can_fill=self._strikes.can_fill)

    def _places(self) -> tuple[str, ...]:
        return tuple(site.address for site in self._strikes.sites())


def _require(wrong: Iterable[str]) -> None:
    found = list(wrong)
    if found:
        raise ViolationError("\n  ".join(found))


def run_campaign(
    campaign: Campaign, directory: Path | None = None, watch: Callable[[Event], None] | None = None
) -> Tally:
    """Run as many events as are asked for.

    Raises:
        ViolationError: something happened that must not; says how to repeat it.
    """
    began = time.monotonic()
    reference = run_processes(NUM_RANKS, undisturbed, _num_steps(campaign), timeout_s=120)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        root = scratch / "disk"
        can_fill = stack.enter_context(small_disk(root))
        (root / "global").mkdir()
        server = None
        if Store.OBJECTS in campaign.stores:
            server = stack.enter_context(ObjectServer())
        variables = server.proxy.store.variables if server else {}
        world = stack.enter_context(World(root, variables, TIMEOUT_S))
        run = Run(world, Strikes(root, server, can_fill), reference)
        _play(run, campaign, watch or (lambda _: None))
    run.tally.seconds = time.monotonic() - began
    return run.tally


def _num_steps(campaign: Campaign) -> int:
    return 2 * MAX_STEPS * (campaign.num_events + 10)


def _play(run: Run, campaign: Campaign, watch: Callable[[Event], None]) -> None:
    run.start()
    num_left = campaign.num_events
    for event in build_schedule(campaign.seed, campaign.stores):
        watch(event)
        try:
            num_left -= run.happen(event)
        except ViolationError as violation:
            raise ViolationError(
                f"seed {campaign.seed}, {event}\n  {violation}\n  again: {campaign}"
            ) from violation
        if not num_left:
            break
    run.finish()


def report(campaign: Campaign, tally: Tally) -> str:
    """One line of JSON."""
    return json.dumps(
        {
            "seed": campaign.seed,
            "events": tally.events.total(),
            "again": str(campaign),
            "by_kind": dict(sorted(tally.events.items())),
            "recovered_from": dict(sorted(tally.ends.items())),
            "processes": tally.num_started,
            "seconds": round(tally.seconds, 1),
            "pid": os.getpid(),
        }
    )
