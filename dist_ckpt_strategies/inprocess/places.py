"""The places of a job's nodes: who has one, who renews it no longer, and who takes it over.

A job of N nodes has N places, for as long as it lives. ``place/<p>`` in the job's store holds
``<node>#<n>``: the node that owns the place renews it by replacing n with n + 1, so renewal and
ownership are one key. Each node judges by its own clock how long ago it has seen a key change.
docs/design/nodes.md has the keys and the limits.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.errors import (
    PeerError,
    PeerLostError,
    PlanError,
    RestartError,
    text_of,
)
from dist_ckpt_strategies.inprocess.job import (
    FENCED,
    GAVE_UP,
    NODE_MISSING,
    SIGNAL_CODE,
    Ended,
    News,
    Nodes,
    Placed,
)
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode
from dist_ckpt_strategies.inprocess.store_rendezvous import RestartState

_DONE, _LEFT = "done", "left"
"""Instead of n: the node has finished its ranks; it has left its place."""

_HOST = "127.0.0.1"
_RENEWALS_PER_TTL = 10
_PAUSE_S = 0.5
_CLOSED = "closed"

OUTSIDE = (
    "the script makes process groups outside of HPWrapper, and a new process cannot join those of "
    "the others: call init_process_group in the wrapped function, or start the script with torchrun"
)
"""Why a rank cannot be replaced, and the remedy."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Value of a place's key, and since when this node has seen it."""

    value: str
    silent_s: float

    @property
    def node(self) -> str:
        return self.value.partition("#")[0]

    @property
    def state(self) -> str:
        """A number, or how the node has ended; "" if there has been none."""
        return self.value.partition("#")[2]

    @property
    def why(self) -> str:
        """How the node was lost, in words."""
        name = self.node.rpartition(":")[0]
        if self.state == _LEFT:
            return f"node {name} has left"
        return f"node {name} no longer renews its place"

    def is_held(self, ttl_s: float) -> bool:
        """Whether a node renews the place."""
        return self.state not in {"", _DONE, _LEFT} and self.silent_s < ttl_s


class OnlyPlace:
    """The place of a node that is a job of its own. See Places, for jobs of several nodes."""

    node = ""

    def __init__(self, post: Callable[[News], object]) -> None:
        self._post = post
        self._host = host_store(_HOST)
        self.address = _HOST, int(self._host.port)

    def connect(self, _on_note: Callable[[str], object]) -> JobStore:
        """A client of the job's store."""
        return JobStore(*self.address)

    def start(self, _tell_guard: Callable[[str], object]) -> None:
        """See Places."""
        self._post(Placed(0))

    def finish(self) -> None:
        """See Places."""
        self.close(0, "")

    def close(self, code: int, why: str) -> None:
        """See Places."""
        self._post(Ended(code, why))

    def announce_leave(self) -> None:
        """See Places."""

    def is_handed_over(self, _restart_round: int) -> bool:
        """See Places."""
        return False

    def leave(self, *_: object, **__: object) -> None:
        """See Places."""


class Places:
    """One node's part in the places of its job; a thread of its own asks the store for long.

    ``post`` is called with news, on that thread; ``on_note`` with a text while no store answers
    yet.

    Raises a PeerLostError if no store comes to the endpoint in the time that a node is waited for,
    and a PlanError if the store belongs to a job with other options.

    Attributes:
        node: name of this node.
        address: of the job's store.
    """

    def __init__(
        self, nodes: Nodes, post: Callable[[News], object], on_note: Callable[[str], object]
    ) -> None:
        self._nodes, self._post = nodes, post
        self.node = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.address = nodes.endpoint
        self._host = _hosted(nodes)
        self._store = self.connect(on_note)
        self._state = RestartState(self._store)
        self._place: int | None = None
        self._began = time.monotonic()
        self._key = self._written = ""
        self._count = 0
        self._seen: dict[str, tuple[str, float]] = {}
        self._lost: dict[int, str] = {}
        self._closed: Ended | None = None
        self._has_news = threading.Event()
        self._is_finished = self._is_stopped = self._has_told = False
        self._require_same_job()

    def start(self, tell_guard: Callable[[str], object]) -> None:
        """Take a place and keep it, on a thread, until the job ends or this node's part in it.

        The guard is told when each look at the store was begun that found the place to be this
        node's. It has to kill the workers if no more such news come.
        """
        self._tell_guard = tell_guard
        self._thread = threading.Thread(target=self._keep, name="dist-ckpt-place", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Note that all ranks of this node have ended well."""
        self._is_finished = True
        self._has_news.set()

    def close(self, code: int, why: str) -> None:
        """End the job on all nodes, unless it has ended."""
        found = self._store.compare_set(_CLOSED, "", json.dumps([code, why]))
        self._closed = Ended(*json.loads(found))

    def announce_leave(self) -> None:
        """Say that this node was asked to leave, and how many spare nodes wait for places."""
        if self._place is None or self._host is not None:  # the job ends without its store
            return
        with suppress(PeerError):
            owners = [self._store.get(f"spare/{s}") for s in range(self._nodes.num_spare_nodes)]
            num_free = sum(1 for one in owners if one and not one.endswith(f"#{_LEFT}"))
            restart_round = self._state.current()
            self._store.compare_set(f"spares/{restart_round}", "", str(num_free))
            self._store.add(f"leaving/{restart_round}")

    def is_handed_over(self, restart_round: int) -> bool:
        """Whether nodes were asked to leave in a round, and spare nodes take all their places."""
        num_leaving = int(self._store.get(f"leaving/{restart_round}") or 0)
        num_free = int(self._store.get(f"spares/{restart_round}") or 0)
        return 0 < num_leaving <= num_free and not self._state.has_finished()

    def leave(
        self, signals: Sequence[int], wait_s: float, *, is_fenced: bool, is_done: bool
    ) -> None:
        """Leave the job, once no worker of this node is left.

        ``signals`` have ended this agent. A store that is hosted here stays until the others have
        gone, whose workers may take ``wait_s``, or until a second signal. A node that is fenced
        leaves nothing behind: the place may be another's.
        """
        self._is_stopped = True
        self._has_news.set()
        self._thread.join(_PAUSE_S if is_fenced else None)
        if is_fenced:
            return
        with suppress(PeerError):
            if signals and (is_done or self._host is not None):  # no spare node can go on
                name = self.node.partition(":")[0]
                self.close(SIGNAL_CODE + signals[0], f"node {name} was asked to end")
            if self._closed is None and self._key and not self._is_done():
                self._write(f"{self.node}#{_LEFT}")
            self._store.set(f"gone/{self.node}", "1")
            if self._closed is not None:
                self._await_others(signals, self._nodes.ttl_s + wait_s)
        self._store.close()

    def connect(self, on_note: Callable[[str], object]) -> JobStore:
        """A client of the job's store, which may come as late as a node may; else PeerLostError."""
        nodes, (host, port) = self._nodes, self.address
        deadline = time.monotonic() + nodes.wait_s
        is_waiting = False
        while True:
            try:
                # Torch's client would write a trace to stderr for an address without an answer.
                socket.create_connection(self.address, nodes.fence_s).close()
                return JobStore(host, port, timeout_s=2 * nodes.fence_s)
            except (OSError, PeerLostError) as error:
                why = f"the rendezvous store at {host}:{port} does not answer: {error}"
                if time.monotonic() > deadline:
                    raise PeerLostError(None, why) from error
            if not is_waiting:
                on_note(f"{why}; it may come within {nodes.wait_s:g} s (--node-wait)")
            is_waiting = True
            time.sleep(_PAUSE_S)

    # On the thread

    def _keep(self) -> None:
        """Take a place and renew it, until the job ends or another node has it."""
        try:
            ended = self._renew_until_the_end()
        except RestartError as error:
            ended = Ended(GAVE_UP, error.message)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing renews the place
            ended = Ended(FENCED, text_of(error))
        self._post(ended)
        if ended.code == FENCED:  # the main thread may be held up
            with suppress(PeerLostError):  # the guard is gone: it has fired
                self._tell_guard("fence")

    def _renew_until_the_end(self) -> Ended:
        """How the job has ended.

        Raises a PeerLostError if another node has the place, or the store does not answer, and a
        RestartError if too many spare nodes wait.
        """
        if self._nodes.is_store_only and self._host is None:
            return Ended(0, "another agent of this machine hosts the store")
        self._look_around()
        while self._closed is None and not self._is_stopped:
            self._has_news.wait(self._nodes.ttl_s / _RENEWALS_PER_TTL)
            self._has_news.clear()
            self._look_around()
        return self._closed or Ended(0, "")

    def _require_same_job(self) -> None:
        nodes = self._nodes
        ours = json.dumps(
            {
                "--rdzv-id": nodes.run_id,
                "--nnodes": nodes.num_nodes,
                "--nproc-per-node": nodes.num_ranks,
                "--spare-nodes": nodes.num_spare_nodes,
                "--node-ttl": nodes.ttl_s,
            }
        )
        found = self._store.compare_set("job", "", ours)
        if found != ours:
            host, port = nodes.endpoint
            raise PlanError(
                f"the store at {host}:{port} belongs to another job, or to agents with other "
                f"options: expected {ours}, found {found}; start all agents with the same options"
            )

    def _look_around(self) -> None:
        """Renew what this node has; then do what falls to it where other nodes are lost."""
        begun = time.monotonic()
        if self._key and not self._is_done():
            self._count += 1
            self._write(f"{self.node}#{_DONE if self._is_finished else self._count}")
        closed = self._store.get(_CLOSED)
        if closed is not None:
            self._closed = Ended(*json.loads(closed))
            self._tell_guard("renewed inf")  # no node takes the place any more
            return
        self._tell_guard(f"renewed {begun}")
        is_idle = self._place is None or self._is_done()
        self._watch_others(is_idle=is_idle)
        if not self._key and not self._nodes.is_store_only:
            self._wait_as_spare()
        places = (f"place/{place}" for place in range(self._nodes.num_nodes))
        if is_idle and all(self._seen[key][0].endswith(f"#{_DONE}") for key in places):
            self.close(0, "")

    def _watch_others(self, *, is_idle: bool) -> None:
        """Look at all places if this node has nothing to do, else at those before its own.

        Stops at the nearest place that is held: its node watches the earlier ones.
        """
        size, wanted = self._nodes.num_nodes, self._nodes.node_rank
        if self._place is not None and not is_idle:
            watched = [(self._place - step) % size for step in range(1, size)]
        else:
            watched = [*([wanted] if wanted is not None and wanted < size else []), *range(size)]
        for place in watched:
            seen = self._look(f"place/{place}")
            if seen.is_held(self._nodes.ttl_s):
                if not is_idle:
                    return
            elif seen.state != _DONE:
                self._note_loss(place, seen)
                if not self._take_over(place, seen):
                    self._require_in_time(place, seen)

    def _note_loss(self, place: int, seen: _Seen) -> None:
        """End the round of a place's ranks, once for each node that was lost."""
        if not seen.value or self._lost.get(place) == seen.value:
            return
        self._lost[place] = seen.value
        self._post(f"place {place}: {seen.why}")
        self._store.set(f"gone/{seen.node}", "1")
        self._end_round(place, seen.why)

    def _take_over(self, place: int, seen: _Seen) -> bool:
        """Take a vacant place, if this node waits for one and no other node is faster."""
        is_waiting = self._place is None and not self._nodes.is_store_only
        if not is_waiting or not self._take(f"place/{place}", seen.value):
            return False
        self._place = place
        if seen.value:
            self._end_round(place, seen.why)  # which its workers may have joined meanwhile
        self._post(f"this node has place {place}")
        self._post(Placed(place))
        return True

    def _require_in_time(self, place: int, seen: _Seen) -> None:
        """End the job if no node has taken a place for too long."""
        if seen.silent_s > self._nodes.ttl_s + self._nodes.wait_s:
            self.close(
                NODE_MISSING,
                f"place {place}: {seen.why if seen.value else 'no node has come'}, and none has "
                f"taken it within {self._nodes.wait_s:g} s (--node-wait); start the job again",
            )

    def _look(self, key: str) -> _Seen:
        value, now = self._store.get(key) or "", time.monotonic()
        if self._seen.get(key, (None,))[0] != value:
            self._seen[key] = value, now
        return _Seen(value, now - self._seen[key][1])

    def _is_done(self) -> bool:
        return self._written.endswith(f"#{_DONE}")

    def _wait_as_spare(self) -> None:
        """Take one of the spare nodes' keys, so that the limit of spare nodes holds.

        Raises a RestartError if all have been taken for longer than a node is waited for.
        """
        for number in range(self._nodes.num_spare_nodes):
            seen = self._look(key := f"spare/{number}")
            is_free = seen.state in {"", _LEFT} or seen.silent_s > self._nodes.ttl_s
            if is_free and self._take(key, seen.value):
                self._post("all places are taken; this node waits as a spare")
                self._post(Placed(None))
                return
        size, num_spares = self._nodes.num_nodes, self._nodes.num_spare_nodes
        taken = f"all {size} places and those of {num_spares} spare nodes are taken by other nodes"
        if not self._has_told:
            self._post(f"{taken}; one may get free within {self._nodes.wait_s:g} s (--node-wait)")
        self._has_told = True
        if time.monotonic() - self._began > self._nodes.wait_s:
            raise RestartError(f"{taken}; raise --spare-nodes, or leave this node out")

    def _take(self, key: str, seen: str) -> bool:
        """Make a key this node's, if it still holds what was seen; then give up the one before."""
        value = f"{self.node}#0"
        if self._store.compare_set(key, seen, value) != value:
            return False
        if self._key:
            self._write("")
        self._key, self._written, self._count = key, value, 0
        return True

    def _write(self, value: str) -> None:
        """Replace what this node has written last; a PeerLostError if another node has."""
        found = self._store.compare_set(self._key, self._written, value)
        if found != value:
            other = found.partition("#")[0].rpartition(":")[0]
            raise PeerLostError(None, f"{self._key} of this node belongs to node {other} now")
        self._written = value

    def _end_round(self, place: int, why: str) -> None:
        """Have the others leave what they do with ranks of a place; no rank if none has joined."""
        restart_round = self._state.current()
        ranks = range(place * self._nodes.num_ranks, (place + 1) * self._nodes.num_ranks)
        missing = self._state.without("reached", restart_round, ranks)
        joined = [rank for rank in ranks if rank not in missing]
        if joined:
            self._state.end(Fault(joined[0], restart_round, FaultMode.DEATH, why))
        if self._state.has_finished():
            self.close(
                GAVE_UP,
                f"place {place}: {why}, after a wrapped block had ended on all ranks; new "
                "processes could not catch up with the others",
            )
        elif not joined and self._store.has_foreign_keys("default_pg/"):
            self.close(GAVE_UP, f"place {place}: {why}; {OUTSIDE}")

    def _await_others(self, signals: Sequence[int], patience_s: float) -> None:
        """Wait until the other nodes have gone that can be expected to, where the store is here."""
        if self._host is None:
            return
        deadline = time.monotonic() + patience_s
        keys = [f"place/{place}" for place in range(self._nodes.num_nodes)]
        keys += [f"spare/{number}" for number in range(self._nodes.num_spare_nodes)]
        owners = [(self._store.get(key) or "").partition("#") for key in keys]
        gone = [f"gone/{node}" for node, _, state in owners if node and state != _LEFT]
        while not self._store.check(gone) and time.monotonic() < deadline and not signals[1:]:
            time.sleep(_PAUSE_S)


def _hosted(nodes: Nodes) -> Any:
    """The job's store, if its address is one of this machine's and no other agent hosts it."""
    host, port = nodes.endpoint
    if not (nodes.is_store_only or _is_of_this_machine(host)):
        return None
    try:
        return host_store(host, port)
    except PeerError:
        return None


def _is_of_this_machine(host: str) -> bool:
    with suppress(OSError):  # no such name, or an address of another machine
        for family, kind, number, _, address in socket.getaddrinfo(host, 0, 0, socket.SOCK_STREAM):
            with socket.socket(family, kind, number) as probe:
                probe.bind(address)
                return True
    return False
