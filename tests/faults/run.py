"""A campaign: training, events and recoveries, attempts of operations, and files that change."""

import json
import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from torch._C._distributed_c10d import TCPStore

from dist_ckpt_strategies import prune
from tests.cli.commands import run
from tests.cluster import faults as cluster_faults
from tests.cluster.job import STORE, Shape, started
from tests.cluster.namespaces import Cluster
from tests.faults import judge
from tests.faults.changes import Change, run_changes
from tests.faults.files import local_copies
from tests.faults.injection import TARGETS, Trap
from tests.faults.judge import LOSSES, Reference
from tests.faults.operations import OPERATIONS
from tests.faults.oracle import NUM_RANKS, Found, Ledger
from tests.faults.outside import Outside, object_server
from tests.faults.rank import HOST, NUM_KEPT, NUM_SHARDS, SEED, Recovered, Trained, run_rank
from tests.faults.schedule import (
    MAX_STEPS,
    Attempt,
    During,
    Event,
    Strike,
    build_attempt,
    build_event,
)
from tests.support.processes import process_state
from tests.support.ranks import Processes, RankDiedError, done_by
from tests.support.sharded_training import undisturbed

TIMEOUT_S = 60.0  # more than the machine may stand still for, and than a store is given to answer
SHORT_TIMEOUT_S = 2.5  # of waits for peers while one falls silent
_NUM_GLOBAL_KEPT = 4
_ANSWER_SLACK_S = 60.0
_MAX_NAP_S = 0.6
_MAX_DELAY_S = 0.25
_GOOD_EVERY = 4  # after so many attempts one without a fault has to come to a good end
_CULPRIT = 2
_POLL_S = 0.02
_TRACE_S = 1.0
_MAX_JOINS = 3
_SIGNALS: Mapping[Strike, int | None] = {
    Strike.KILL: signal.SIGKILL,
    Strike.WAKE: signal.SIGSTOP,
    Strike.PAUSE: signal.SIGSTOP,
    Strike.FAIL: None,
}


@dataclass(frozen=True, slots=True)
class Campaign:
    seed: int  # of the schedule
    num_events: int  # of the training, that have to happen
    num_attempts: int  # of operations
    num_changes: int  # of files of checkpoints of each kind
    num_node_faults: int = 0  # of a job on a cluster

    def __str__(self) -> str:
        """How to repeat it."""
        return (
            f"python -m tests.faults --seed {self.seed} --events {self.num_events} --attempts "
            f"{self.num_attempts} --changes {self.num_changes} --node-faults {self.num_node_faults}"
        )


@dataclass(slots=True)
class Tally:
    """What has happened: events by what struck and where the next recovery found a checkpoint,
    attempts by operation, changes by kind of checkpoint, fault and what was hit; faults of nodes
    by kind, with the seconds until the job went on."""

    events: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    node_faults: dict[str, list[float]] = field(default_factory=dict)


class ViolationError(Exception):
    """Something that must never happen did."""


class World:
    """Four ranks, each from ``join`` to ``kill``."""

    def __init__(self, root: Path, variables: Mapping[str, str], timeout_s: float) -> None:
        self._root, self._variables, self._timeout_s = root, dict(variables), timeout_s
        # As under torchrun, the store lives outside the ranks and outlasts each of them.
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._processes = Processes()
        self._num_joins = 0

    def join(self, jump: int) -> None:
        """Start the ranks that are missing, and have all make process groups.

        Where survivors cannot, all are started anew.
        """
        for _ in range(_MAX_JOINS):
            for rank in set(range(NUM_RANKS)) - self._processes.ranks():
                task = (self._root, self._store.port, self._variables)
                self._processes.start(rank, run_rank, *task)
            self._num_joins += 1
            answers = self.ask_all("join", f"groups{self._num_joins}", jump, self._timeout_s)
            if all(answer is None for answer in answers.values()):
                return
            self.kill(*range(NUM_RANKS))
        raise ViolationError(f"the ranks do not come together: {answers}")

    def ask_all(self, name: str, *args: Any) -> dict[int, Any]:
        """Give all ranks the same order; see ``ask``."""
        return self.ask(dict.fromkeys(range(NUM_RANKS), (name, args)))

    def ask(
        self, orders: Mapping[int, Any], timeout_s: float = 120.0, *, nap_s: float = math.inf
    ) -> dict[int, Any]:
        """Give orders, and wait for what the ranks come to; see ``Processes.receive``.

        Args:
            orders: by rank, a method of Rank and its arguments.
            timeout_s: by which all have answered, or, from when it is to go on, a stopped one.
            nap_s: after so many seconds, or once all others have answered, that happens.
        """
        deadline = time.monotonic() + timeout_s
        for rank, order in orders.items():
            self._processes.send(rank, order)
        answers: dict[int, Any] = {}
        asleep: dict[int, float] = {}
        while waiting := [rank for rank in orders if rank not in answers]:
            answers |= self._processes.receive(waiting, _POLL_S)
            now = time.monotonic()
            pids = {rank: self._processes.pid(rank) for rank in waiting if rank not in answers}
            still = [rank for rank, pid in pids.items() if process_state(pid) == "T"]
            are_last = len(answers) + len(still) == len(orders)
            for rank in still:
                if are_last or now - asleep.setdefault(rank, now) >= nap_s:
                    os.kill(pids[rank], signal.SIGCONT)
                    deadline = now + timeout_s
            if now > deadline:
                raise self._stuck(list(pids), timeout_s)
        return answers

    def kill(self, *ranks: int) -> None:
        self._processes.end(*ranks)

    def _stuck(self, ranks: list[int], timeout_s: float) -> ViolationError:
        for rank in self._processes.ranks():
            os.kill(self._processes.pid(rank), signal.SIGUSR1)
        time.sleep(_TRACE_S)
        return ViolationError(f"a hang: ranks {ranks} have not answered within {timeout_s:g} s")


class Run:
    """The state of a campaign, as the driver knows it."""

    def __init__(self, world: World, outside: Outside, reference: Reference) -> None:
        self._world = world
        self._outside = outside
        self._reference = reference
        self._ledger = Ledger(NUM_KEPT)
        self._jump = 1
        self._operation = ""

    def start(self) -> None:
        self._world.join(self._jump)
        self._begin()

    def happen(self, event: Event) -> str:
        """Train, let the event happen, and recover; what happened, empty if nothing did."""
        if event.during is During.NOTHING:
            self._train(event, None)
            damaged = self._outside.damaged(event, self._ledger)
            has_happened = damaged is not None
            self._ledger = damaged or self._ledger
        else:
            if event.during is During.SAVE:
                answers = self._train(event, event)
            else:
                self._train(event, None)
                answers = self._recover_disturbed(event)
            has_happened = _has_struck(event, answers)
            self._mend(event, answers)
        found = self._recover()
        self._verify()
        self._prune()
        return f"{event.strike}: {found}" if has_happened else ""

    def attempt(self, attempt: Attempt) -> None:
        """Have all ranks try an operation in which a call fails on one of them."""
        scratch = self._outside.root / "operation"
        if attempt.operation != self._operation:
            shutil.rmtree(scratch, ignore_errors=True)
            self._world.ask_all("prepare", attempt.operation, scratch / "shared")
            self._operation = attempt.operation
        trap = Trap(None, attempt.call, target=attempt.target, for_ever=attempt.for_ever)
        is_good_too = attempt.number % _GOOD_EVERY == _GOOD_EVERY - 1
        for culprit in [_CULPRIT, None] if is_good_too else [_CULPRIT]:
            directory = scratch / f"{attempt.number} {culprit}"
            orders = {
                rank: ("attempt", (directory, trap if rank == culprit else None))
                for rank in range(NUM_RANKS)
            }
            _require(judge.check_attempt(self._world.ask(orders), culprit))
            shutil.rmtree(directory, ignore_errors=True)

    def finish(self) -> None:
        """Train a little longer, undisturbed."""
        answers = self._act(None, "train", MAX_STEPS, (), "")
        _require(judge.check_training(None, answers, self._reference, TIMEOUT_S))

    def _train(self, event: Event, striking: Event | None) -> dict[int, Any]:
        address = self._outside.place_of(event).address
        answers = self._act(striking, "train", event.steps, event.saves, address)
        self._observe(answers, striking)
        limit_s = _timeout_s(striking)
        _require(judge.check_training(striking, answers, self._reference, limit_s))
        return answers

    def _recover_disturbed(self, event: Event) -> dict[int, Any]:
        answers = self._act(event, "recover", self._addresses())
        known, limit_s = (self._ledger, self._reference), _timeout_s(event)
        _require(judge.check_disturbed_recovery(event, answers, *known, limit_s))
        if event.strike is Strike.LOSE_NODE:
            self._ledger = self._ledger.with_copies(local_copies(self._outside.root))
        return answers

    def _recover(self) -> str:
        """Where the newest whole checkpoint is, or that it is the beginning for lack of one."""
        answers = self._act(None, "recover", self._addresses())
        _require(judge.check_recovery(answers, self._ledger, self._reference))
        first = answers[0]
        assert isinstance(first, Recovered)
        if isinstance(first.found, Found):
            return str(first.found.tier)
        self._begin()
        return "the beginning"

    def _verify(self) -> None:
        """``dist-ckpt verify`` of every finished global checkpoint agrees with the ledger."""
        issues = {}
        for name in self._ledger.global_:
            result = run("verify", name, "--json")
            found = json.loads(result.stdout or "{}").get("issues", ())
            # 3: a marker may say another backend now
            if result.exit_code not in {0, 1, 3} or (result.exit_code and not found):
                raise ViolationError(f"verify {name}: {result.output}")
            issues[name] = len(found)
        _require(judge.check_verified(self._ledger, issues))

    def _prune(self) -> None:
        """``prune`` removes the oldest, and what killed saves have left, and nothing else."""
        for address in self._addresses():
            before = self._finished_below(address)
            if not before:
                continue
            report = prune(address, keep_last=_NUM_GLOBAL_KEPT, unfinished=True, older_than_s=0)
            after = self._finished_below(address)
            _require(judge.check_pruned(before, after, _NUM_GLOBAL_KEPT))
            gone = set(before) - set(after)
            if not {name.rpartition("/")[2] for name in gone} <= {r.name for r in report.removed}:
                raise ViolationError(f"{gone} are gone, and prune says {report.removed}")
            self._ledger = self._ledger.without_global(gone)

    def _finished_below(self, address: str) -> dict[str, int]:
        found = self._outside.finished()
        return {name: at for name, at in found.items() if name.startswith(f"{address}/")}

    def _begin(self) -> None:
        digests = self._world.ask_all("begin")
        if any(digest != self._reference[rank][0] for rank, digest in digests.items()):
            raise ViolationError(f"the beginning is another one: {digests}")

    def _act(self, event: Event | None, name: str, *args: Any) -> dict[int, Any]:
        """What the ranks come to, while the event happens."""
        timeout_s = _timeout_s(event)
        orders = {rank: (name, (*args, timeout_s, _trap(event, rank))) for rank in range(NUM_RANKS)}
        is_pause = event is not None and event.strike is Strike.PAUSE
        nap_s = event.share * _MAX_NAP_S if event and is_pause else math.inf
        with self._outside.during(event) if event else nullcontext():
            return self._world.ask(orders, 2 * timeout_s + _ANSWER_SLACK_S, nap_s=nap_s)

    def _mend(self, event: Event, answers: Mapping[int, Any]) -> None:
        """See that all ranks are there, and in touch with each other."""
        lost = [rank for rank, answer in answers.items() if isinstance(answer, RankDiedError)]
        if lost or event.strike is Strike.WAKE:
            self._world.kill(*(lost if event.do_others_stay else answers))
            self._jump = event.jump
            self._world.join(self._jump)

    def _observe(self, answers: Mapping[int, Any], event: Event | None) -> None:
        """Note what the saves have left, and that nothing else has changed."""
        saves = judge.saves_of(answers)
        may_differ = event is not None and event.strike in LOSSES
        ledger, wrong = judge.observed_global(
            self._ledger, saves, self._outside.finished(), may_differ=may_differ
        )
        self._ledger, more = judge.observed_copies(
            ledger,
            saves,
            local_copies(self._outside.root),
            self._jump,
            may_differ=may_differ,
            lost_node=event.victim if event and event.strike is Strike.LOSE_NODE else None,
        )
        _require([*wrong, *more])

    def _addresses(self) -> tuple[str, ...]:
        return tuple(place.address for place in self._outside.places())


def _timeout_s(event: Event | None) -> float:
    return SHORT_TIMEOUT_S if event and event.strike in LOSSES else TIMEOUT_S


def _trap(event: Event | None, rank: int) -> Trap | None:
    if event is None or rank != event.victim or event.strike not in _SIGNALS:
        return None
    number = _SIGNALS[event.strike]
    is_timed = event.is_timed and number is not None
    return Trap(number, event.call, event.share * _MAX_DELAY_S if is_timed else 0.0)


def _has_struck(event: Event, answers: Mapping[int, Any]) -> bool:
    """Whether the event was there for anybody to see."""
    if event.strike in {Strike.OUTAGE, Strike.LOSE_NODE} | LOSSES:
        return True
    results = [one for one in answers.values() if isinstance(one, (Trained, Recovered))]
    return any(one.has_struck for one in results)


def _require(wrong: Iterable[str]) -> None:
    found = list(wrong)
    if found:
        raise ViolationError("\n  ".join(found))


Watch = Callable[[Event | Attempt | Change | str], None]


def run_campaign(
    campaign: Campaign, directory: Path | None = None, watch: Watch = lambda _: None
) -> Tally:
    """Run what is asked for; a ViolationError says how to repeat it."""
    tally = Tally()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        if campaign.num_events or campaign.num_attempts:
            _run_job(campaign, Path(scratch), watch, tally)
        if campaign.num_changes:
            for change, wrong in run_changes(campaign.seed, campaign.num_changes, Path(scratch)):
                with _named(campaign, change, watch):
                    _require(wrong)
                damage = change.damage
                tally.changes[f"{change.checkpoint}: {damage.fault} of {damage.what}"] += 1
        if campaign.num_node_faults:
            _run_cluster(campaign, Path(scratch) / "cluster", watch, tally)
    return tally


def _run_cluster(campaign: Campaign, scratch: Path, watch: Watch, tally: Tally) -> None:
    """A job of four nodes and a spare one, which goes on after each fault."""
    shape = Shape(num_nodes=4, num_shards=4, save_every=20)
    names = [f"n{number}" for number in range(shape.num_nodes + shape.num_spare_nodes)]
    scratch.mkdir()
    with Cluster(scratch, [STORE, *names]) as cluster:
        with _named(campaign, "the start of a job on a cluster", watch):
            job = started(cluster, shape, *names)
            job.await_spares()
        for number in range(1, campaign.num_node_faults + 1):
            chance = random.Random(f"{campaign.seed}/{number}")
            kind = chance.choice(list(cluster_faults.ALL))
            with _named(campaign, f"node fault {number}: {kind}", watch):
                seconds = cluster_faults.happen(job, cluster_faults.ALL[kind], chance)
            tally.node_faults.setdefault(kind, []).append(seconds)
        with _named(campaign, "the end of the job", watch):
            codes = job.finish(2 * shape.save_every)
            job.require_right()
            job.require_whole_checkpoints()
            assert not any(codes.values()), f"exit codes {codes}: {job.report()}"


def _run_job(campaign: Campaign, scratch: Path, watch: Watch, tally: Tally) -> None:
    num_steps = 2 * MAX_STEPS * (campaign.num_events + 10)
    reference = done_by(NUM_RANKS, undisturbed, NUM_SHARDS, SEED, num_steps)
    with ExitStack() as stack:
        root = scratch / "disk"
        (root / "global").mkdir(parents=True)
        server = stack.enter_context(object_server())
        variables = server.store.variables
        stack.enter_context(mock.patch.dict(os.environ, variables))  # for verify and prune
        world = World(root, variables, TIMEOUT_S)
        stack.callback(world.kill, *range(NUM_RANKS))
        job = Run(world, Outside(root, server), reference)
        job.start()
        for number in count():
            if tally.events.total() == campaign.num_events:
                break
            event = build_event(campaign.seed, number)
            with _named(campaign, event, watch):
                if happened := job.happen(event):
                    tally.events[happened] += 1
        job.finish()
        for number in range(campaign.num_attempts):
            attempt = build_attempt(campaign.seed, number, list(OPERATIONS), list(TARGETS))
            with _named(campaign, attempt, watch):
                job.attempt(attempt)
            tally.attempts[attempt.operation] += 1


@contextmanager
def _named(
    campaign: Campaign, what: Event | Attempt | Change | str, watch: Watch
) -> Iterator[None]:
    """Show what happens within the block, and have a violation say how to repeat it."""
    watch(what)
    try:
        yield
    except (ViolationError, AssertionError, TimeoutError) as violation:
        text = f"seed {campaign.seed}, {what}\n  {violation}\n  again: {campaign}"
        raise ViolationError(text) from violation
