"""A campaign: training, events and recoveries, attempts of operations, and files that change."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from dist_ckpt_strategies import prune
from dist_ckpt_strategies.cli.app import app
from tests.faults import judge
from tests.faults.changes import Change, run_changes
from tests.faults.damage import Outside, checkpoint_at, finished_in, object_server
from tests.faults.files import local_copies
from tests.faults.injection import TARGETS, Act, Trap
from tests.faults.judge import LOSSES, Reference
from tests.faults.operations import LIMIT_S, OPERATIONS
from tests.faults.oracle import Ledger, Tier
from tests.faults.rank import NUM_KEPT, Recovered, SaveOrder, Trained, undisturbed
from tests.faults.schedule import (
    HANGS,
    MAX_STEPS,
    NUM_RANKS,
    Attempt,
    During,
    Event,
    SaveAt,
    Store,
    Strike,
    Survivors,
    build_attempts,
    build_schedule,
)
from tests.faults.world import Answer, Gone, Order, Stopped, StuckError, World
from tests.support.disks import tmpfs
from tests.support.ranks import run_processes

TIMEOUT_S = 60.0
"""More than the machine may stand still for, and than a store is given to answer."""

SHORT_TIMEOUT_S = 2.5
"""Of waits for peers while one falls silent."""

_NUM_GLOBAL_KEPT = 4
_ANSWER_SLACK_S = 60.0
_MAX_NAP_S = 0.6
_MAX_DELAY_S = 0.25
_MAX_LIMIT_NBYTES = 24_000
_DISK_NBYTES = 32 << 20
_GOOD_EVERY = 8
"""After so many attempts one without a fault has to come to a good end."""

_CULPRIT = 2
_ACTS = {
    Strike.KILL: Act.KILL,
    Strike.HANG: Act.STOP,
    Strike.WAKE: Act.STOP,
    Strike.PAUSE: Act.STOP,
    Strike.FAIL: Act.FAIL,
    Strike.LIMIT: Act.LIMIT,
}


class ViolationError(Exception):
    """Something that must never happen did."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is asked for.

    Attributes:
        seed: of the schedule.
        num_events: of the training, that have to happen.
        num_attempts: of operations.
        num_changes: of files of checkpoints of each kind.
        stores: where global checkpoints go, in turn.
    """

    seed: int
    num_events: int
    num_attempts: int
    num_changes: int
    stores: tuple[Store, ...] = tuple(Store)

    def __str__(self) -> str:
        """How to repeat it."""
        counts = (
            f"--events {self.num_events} --attempts {self.num_attempts} "
            f"--changes {self.num_changes}"
        )
        names = " ".join(f"--store {store}" for store in self.stores)
        return f"python -m tests.faults --seed {self.seed} {counts} {names}"


@dataclass(slots=True)
class Tally:
    """What has happened.

    Attributes:
        events: by what struck.
        ends: what recoveries brought, by event and tier.
        attempts: by operation.
        changes: of files, by kind of checkpoint, fault and what was hit.
    """

    events: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)


class Run:
    """The state of a campaign, as the driver knows it."""

    def __init__(self, world: World, outside: Outside, reference: Reference) -> None:
        self._world = world
        self._outside = outside
        self._reference = reference
        self._ledger = Ledger(NUM_RANKS, NUM_KEPT)
        self._step = 0
        self._jump = 1
        self._operation = ""
        self.tally = Tally()

    def start(self) -> None:
        """Start the ranks at step 0."""
        self._world.join(self._jump)
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
            damaged = self._outside.damaged(event, self._ledger)
            has_happened = damaged is not None
            self._ledger = damaged or self._ledger
        elif event.during is During.LOAD:
            answers = self._recover_disturbed(event)
            has_happened = self._has_struck(event, answers)
            self._mend(event, answers)
        self._recover(event)
        self._verify()
        self._prune()
        if has_happened:
            self.tally.events[event.strike] += 1
        return has_happened

    def attempt(self, attempt: Attempt) -> None:
        """Have all ranks try an operation in which a call fails on one of them.

        Raises:
            ViolationError: some rank does not learn of it, or the ranks cannot go on.
        """
        scratch = self._outside.root / "operation"
        if attempt.operation != self._operation:
            self._ask(("clean", (scratch,)), LIMIT_S)
            self._ask(("prepare", (attempt.operation, scratch / "shared")), LIMIT_S)
            self._operation = attempt.operation
        trap = Trap(Act.FAIL, attempt.call, target=attempt.target, for_ever=attempt.for_ever)
        directory = scratch / str(attempt.number)
        orders = dict.fromkeys(range(NUM_RANKS), ("attempt", (directory, None)))
        answers = self._ask_each(orders | {_CULPRIT: ("attempt", (directory, trap))}, None, LIMIT_S)
        _require(judge.check_attempt(answers, _CULPRIT))
        if attempt.number % _GOOD_EVERY == _GOOD_EVERY - 1:
            again = scratch / "again"
            _require(judge.check_attempt(self._ask(("attempt", (again, None)), LIMIT_S), None))
            self._ask(("clean", (again,)), LIMIT_S)
        self._ask(("clean", (directory,)), LIMIT_S)
        self.tally.attempts[attempt.operation] += 1

    def finish(self) -> None:
        """Train a little longer, undisturbed."""
        answers = self._ask(("train", (MAX_STEPS, (), TIMEOUT_S, None)), TIMEOUT_S)
        _require(judge.check_steps(answers, self._reference))
        _require(judge.check_training(None, answers, TIMEOUT_S))

    def _train(self, striking: Event | None, event: Event) -> dict[int, Answer]:
        timeout_s = SHORT_TIMEOUT_S if striking and striking.strike in LOSSES else TIMEOUT_S
        saves = tuple(self._saves(event))
        orders = {
            rank: ("train", (event.steps, saves, timeout_s, self._trap(striking, rank)))
            for rank in range(NUM_RANKS)
        }
        before = self._ledger
        with self._outside.during(striking):
            answers = self._ask_each(orders, striking, timeout_s)
        self._observe(answers, before, striking)
        _require(judge.check_steps(answers, self._reference))
        _require(judge.check_training(striking, answers, timeout_s))
        return answers

    def _saves(self, event: Event) -> Iterator[SaveOrder]:
        """Those of the training before an event, in the order of their steps."""
        address = self._outside.place_of(event).address

        def order(tier: Tier, save: SaveAt) -> SaveOrder:
            where = checkpoint_at(address, self._step + save.after_steps)
            directory = where if tier is Tier.GLOBAL else ""
            return SaveOrder(tier, save.after_steps, save.is_async, directory)

        if event.global_save is not None:
            yield order(Tier.GLOBAL, event.global_save)
        if event.local_save is not None:
            yield order(Tier.LOCAL, event.local_save)

    def _recover_disturbed(self, event: Event) -> dict[int, Answer]:
        timeout_s = SHORT_TIMEOUT_S if event.strike in LOSSES else TIMEOUT_S
        orders = {
            rank: ("recover", (self._addresses(), timeout_s, self._trap(event, rank)))
            for rank in range(NUM_RANKS)
        }
        with self._outside.during(event):
            answers = self._ask_each(orders, event, timeout_s)
        expected = self._ledger
        if event.strike is Strike.LOSE_NODE:
            self._ledger = self._ledger.with_copies(local_copies(self._outside.root))
        if event.strike is Strike.EMPTIED:
            gone = [name for name in self._ledger.global_ if "://" in name]
            self._ledger = self._ledger.without_global(gone)
        _require(
            judge.check_disturbed_recovery(event, answers, expected, self._reference, timeout_s)
        )
        return answers

    def _recover(self, event: Event) -> None:
        """The newest whole checkpoint, or the beginning where there is none."""
        answers = self._ask(("recover", (self._addresses(), TIMEOUT_S, None)), TIMEOUT_S)
        _require(judge.check_recovery(answers, self._ledger, self._reference))
        found = answers[0].value
        assert isinstance(found, Recovered)
        self.tally.ends[f"{event.strike}: {found.tier or 'the beginning'}"] += 1
        if found.tier is None:
            self._begin()
        else:
            self._step = found.iteration

    def _verify(self) -> None:
        """``dist-ckpt verify`` of every finished global checkpoint agrees with the ledger."""
        issues = {}
        for name in self._ledger.global_:
            result = CliRunner().invoke(app, ["verify", name, "--json"])
            if result.exit_code not in {0, 1, 3}:  # 3: a marker may say another backend now
                raise ViolationError(f"verify {name}: {result.output}")
            found = json.loads(result.stdout or "{}").get("issues", ())
            if result.exit_code and not found:
                raise ViolationError(f"verify {name}: {result.output}")
            issues[name] = len(found)
        _require(judge.check_verified(self._ledger, issues))

    def _prune(self) -> None:
        """``prune`` removes the oldest, and what killed saves have left, and nothing else."""
        for place in self._outside.places():
            before = finished_in(place)
            if not before:
                continue
            report = prune(
                place.address, keep_last=_NUM_GLOBAL_KEPT, unfinished=True, older_than_s=0
            )
            after = finished_in(place)
            _require(judge.check_pruned(before, after, _NUM_GLOBAL_KEPT))
            gone = {name.rpartition("/")[2] for name in set(before) - set(after)}
            if not gone <= {one.name for one in report.removed}:
                raise ViolationError(f"{gone} are gone, and prune says {report.removed}")
            self._ledger = self._ledger.without_global(set(before) - set(after))

    def _begin(self) -> None:
        answers = self._ask(("begin", ()), TIMEOUT_S)
        digests = {rank: answer.value for rank, answer in answers.items()}
        if any(digest != self._reference[rank][0] for rank, digest in digests.items()):
            raise ViolationError(f"the beginning is another one: {digests}")
        self._step = 0

    def _ask(self, order: Order, timeout_s: float) -> dict[int, Answer]:
        return self._ask_each(dict.fromkeys(range(NUM_RANKS), order), None, timeout_s)

    def _ask_each(
        self, orders: Mapping[int, Order], event: Event | None, timeout_s: float
    ) -> dict[int, Answer]:
        nap_s = event.share * _MAX_NAP_S if event and event.strike is Strike.PAUSE else None
        try:
            answers = self._world.ask(orders, 2 * timeout_s + _ANSWER_SLACK_S, nap_s=nap_s)
            if event is not None and event.strike is Strike.WAKE:
                for rank, answer in answers.items():
                    if isinstance(answer.value, Stopped):
                        answers[rank] = self._world.wake(rank, 2 * TIMEOUT_S + _ANSWER_SLACK_S)
        except StuckError as error:
            raise ViolationError(f"a hang: {error}") from error
        return answers

    def _mend(self, event: Event, answers: Mapping[int, Answer]) -> None:
        """See that all ranks are there, and in touch with each other."""
        lost = [rank for rank, a in answers.items() if isinstance(a.value, (Gone, Stopped))]
        if not lost and event.strike not in HANGS:
            return
        self._world.kill(*(lost if event.survivors is Survivors.STAY else answers))
        self._jump = event.jump
        try:
            self._world.join(self._jump)
        except StuckError as error:
            raise ViolationError(str(error)) from error

    def _has_struck(self, event: Event, answers: Mapping[int, Answer]) -> bool:
        """Whether the event was there for anybody to see."""
        if event.strike in {Strike.RESTART, Strike.EMPTIED, Strike.LOSE_NODE} | LOSSES:
            return True
        results = [answer.value for answer in answers.values()]
        if event.strike in {Strike.FULL, Strike.LIMIT}:
            saves = [one for r in results if isinstance(r, Trained) for one in r.saves]
            return any(one.failure for one in saves)
        return any(r.has_struck for r in results if isinstance(r, (Trained, Recovered)))

    def _observe(self, answers: Mapping[int, Answer], before: Ledger, event: Event | None) -> None:
        """Note what the saves have left, and that nothing else has changed."""
        saves = judge.saves_by_order(answers)
        strike = event.strike if event is not None else None
        finished: dict[str, int] = {}
        for place in self._outside.places():
            finished |= finished_in(place)
        if strike is Strike.EMPTIED:
            gone = [name for name in before.global_ if "://" in name]
            before = before.without_global(gone)
        may_differ = strike in LOSSES | {Strike.EMPTIED}
        ledger, wrong = judge.observed_global(before, saves, finished, may_differ=may_differ)
        self._ledger, more = judge.observed_copies(
            ledger,
            saves,
            local_copies(self._outside.root),
            self._jump,
            may_differ=may_differ,
            lost_node=event.victim if event and strike is Strike.LOSE_NODE else None,
        )
        _require([*wrong, *more])

    def _trap(self, event: Event | None, rank: int) -> Trap | None:
        """What a rank does to itself. Where a disk cannot be filled, no rank may write anything."""
        if event is None:
            return None
        if event.strike is Strike.FULL and not self._outside.can_fill:
            return Trap(Act.LIMIT, 0)
        if rank != event.victim or event.strike not in _ACTS:
            return None
        act = _ACTS[event.strike]
        is_signal = act in {Act.KILL, Act.STOP}
        return Trap(
            act,
            event.call,
            event.share * _MAX_DELAY_S if event.is_timed and is_signal else None,
            is_certain=is_signal,
            limit_nbytes=int(event.share * _MAX_LIMIT_NBYTES),
        )

    def _addresses(self) -> tuple[str, ...]:
        return tuple(place.address for place in self._outside.places())


def _require(wrong: Iterable[str]) -> None:
    found = list(wrong)
    if found:
        raise ViolationError("\n  ".join(found))


def run_campaign(
    campaign: Campaign,
    directory: Path | None = None,
    watch: Callable[[Event | Attempt | Change], None] = lambda _: None,
) -> Tally:
    """Run as many events, attempts and changes as are asked for.

    Raises:
        ViolationError: something happened that must not; says how to repeat it.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        if campaign.num_events or campaign.num_attempts:
            tally = _run_job(campaign, Path(scratch), watch)
        for name, change, wrong in (
            run_changes(campaign.seed, campaign.num_changes, Path(scratch))
            if campaign.num_changes
            else ()
        ):
            with _named(campaign, change, watch):
                _require(wrong)
            tally.changes[f"{name}: {change.fault} of {change.what}"] += 1
    return tally


def _run_job(
    campaign: Campaign, scratch: Path, watch: Callable[[Event | Attempt | Change], None]
) -> Tally:
    """The events and attempts, of one job."""
    num_steps = 2 * MAX_STEPS * (campaign.num_events + 10)
    reference = run_processes(NUM_RANKS, undisturbed, num_steps, timeout_s=120)
    with ExitStack() as stack:
        root = scratch / "disk"
        can_fill = stack.enter_context(tmpfs(root, _DISK_NBYTES))
        (root / "global").mkdir()
        server, variables = None, {}
        if Store.OBJECTS in campaign.stores:
            server = stack.enter_context(object_server())
            variables = server.proxy.store.variables
        stack.enter_context(mock.patch.dict(os.environ, variables))  # for verify and prune
        world = World(root, variables, TIMEOUT_S)
        stack.callback(world.kill, *range(NUM_RANKS))
        run = Run(world, Outside(root, server, can_fill), reference)
        run.start()
        num_left = campaign.num_events
        for event in build_schedule(campaign.seed, campaign.stores):
            if not num_left:
                break
            with _named(campaign, event, watch):
                num_left -= run.happen(event)
        run.finish()
        attempts = build_attempts(campaign.seed, list(OPERATIONS), list(TARGETS))
        for attempt in islice(attempts, campaign.num_attempts):
            with _named(campaign, attempt, watch):
                run.attempt(attempt)
    return run.tally


@contextmanager
def _named(
    campaign: Campaign,
    what: Event | Attempt | Change,
    watch: Callable[[Event | Attempt | Change], None],
) -> Iterator[None]:
    """Show what happens within the block, and have a violation say how to repeat it."""
    watch(what)
    try:
        yield
    except ViolationError as violation:
        text = f"seed {campaign.seed}, {what}\n  {violation}\n  again: {campaign}"
        raise ViolationError(text) from violation


def report(campaign: Campaign, tally: Tally) -> str:
    """One line of JSON."""
    return json.dumps(
        {
            "again": str(campaign),
            "events": tally.events.total(),
            "by_strike": dict(sorted(tally.events.items())),
            "recovered_from": dict(sorted(tally.ends.items())),
            "attempts": dict(sorted(tally.attempts.items())),
            "changes": dict(sorted(tally.changes.items())),
        }
    )
