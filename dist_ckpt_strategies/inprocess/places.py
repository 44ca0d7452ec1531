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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.errors import PeerError, PeerLostError, PlanError, RestartError
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode
from dist_ckpt_strategies.inprocess.store_rendezvous import RestartState

GAVE_UP, NODE_MISSING, FENCED, KILLED, SIGNAL_CODE = 1, 87, 88, 89, 128
"""Exit codes of an agent: all ended by an error; a node is missing; this node is out; after a
signal ranks had to be killed; a signal, whose number is added."""

_DONE, _LEFT = "done", "left"
"""Instead of n: the node has finished its ranks; it has left its place."""

_FENCES_PER_TTL = 2
_RENEWALS_PER_TTL = 10
_PAUSE_S = 0.5
_CLOSED = "closed"

OUTSIDE = (
    "the script makes process groups outside of HPWrapper, and a new process cannot join those of "
    "the others: call init_process_group in the wrapped function, or start the script with torchrun"
)
"""Why a rank cannot be replaced, and the remedy."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a job. All its agents say the same, but for ``wait_s`` and the last two.

    Attributes:
        num_nodes: places.
        num_ranks: of each node.
        num_spare_nodes: nodes that may wait for a place, for as long as the job runs.
        run_id: name of the job.
        ttl_s: seconds without a renewal after which a place may be given to another node. A node
            that has not renewed its own for half of them kills its workers.
        wait_s: how long the job waits for a node, at its start or for another one's place.
        endpoint: host and port of the store.
        node_rank: the place to take if it is vacant.
        is_store_only: run no ranks, but host the store.
    """

    num_nodes: int
    num_ranks: int
    num_spare_nodes: int = 0
    run_id: str = "none"
    ttl_s: float = 10.0
    wait_s: float = 600.0
    endpoint: tuple[str, int] = ("127.0.0.1", 29400)
    node_rank: int | None = None
    is_store_only: bool = False

    @property
    def fence_s(self) -> float:
        """After how long without a renewal a node's workers are killed."""
        return self.ttl_s / _FENCES_PER_TTL


class Places:
    """One node's part in the places of its job.

    All that asks the store for long is for one thread: ``take``, then ``hold``.

    ``on_renewed`` is called with the time, by the monotonic clock, when a look at the store was
    begun that found this node's place to be its own; ``on_spare`` once this node waits as a spare;
    ``on_note`` with a text where something happens to a node.

    Raises a PeerLostError if no store comes to the endpoint in the time that a node is waited for,
    and a PlanError if the store belongs to a job with other options.
    """

    def __init__(
        self,
        nodes: Nodes,
        on_renewed: Callable[[float], object],
        on_spare: Callable[[], object],
        on_note: Callable[[str], object],
    ) -> None:
        self._nodes = nodes
        self._on_renewed, self._on_spare, self._on_note = on_renewed, on_spare, on_note
        self.node = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.place: int | None = None
        self._host = _hosted(nodes)
        self._store = connected_store(nodes, on_note)
        self._state = RestartState(self._store)
        self._began = time.monotonic()
        self._key = self._written = ""
        self._count = 0
        self._seen: dict[str, tuple[str, float]] = {}
        self._lost: dict[int, str] = {}
        self._closed: tuple[int, str] | None = None
        self._has_news = threading.Event()
        self._is_finished = self._is_stopped = False
        self._require_same_job()

    def take(self) -> int | None:
        """Take a place that is vacant, or wait for one; None where the job has ended before.

        None too where this agent is for the store alone, and another one hosts it. Raises a
        RestartError if too many spare nodes wait, and a PeerLostError as ``hold`` does.
        """
        if self._nodes.is_store_only and self._host is None:
            self._closed = (0, "another agent of this machine hosts the store")
            return None
        self._look_around()
        while self.place is None and self._closed is None and not self._is_stopped:
            self._pause()
            self._look_around()
        return self.place

    def hold(self) -> tuple[int, str]:
        """Keep the place until the job ends; its exit code, and why.

        Raises a PeerLostError if another node has the place, or the store does not answer.
        """
        while self._closed is None and not self._is_stopped:
            self._pause()
            self._look_around()
        return self._closed or (0, "")

    def finish(self) -> None:
        """Note that all ranks of this node have ended well."""
        self._is_finished = True
        self._has_news.set()

    def close(self, code: int, why: str) -> None:
        """End the job on all nodes, unless it has ended."""
        found = self._store.compare_set(_CLOSED, "", json.dumps([code, why]))
        self._closed = tuple(json.loads(found))

    def announce_leave(self) -> None:
        """Say that this node was asked to leave, and how many spare nodes wait for places."""
        if self.place is None or self._host is not None:  # the job ends without its store
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

    def stop(self) -> None:
        """Have ``take`` and ``hold`` return soon."""
        self._is_stopped = True
        self._has_news.set()

    def shutdown(self, signals: Sequence[int], patience_s: float) -> None:
        """Leave the job, after ``stop``, once no worker of this node is left.

        ``signals`` have ended this agent. A store that is hosted here stays until the others have
        gone, whose workers may take ``patience_s``, or until a second signal.
        """
        with suppress(PeerError):
            if self._host is not None and signals:
                self.close(SIGNAL_CODE + signals[0], "the host of the store was asked to end")
            if self._closed is not None:
                self._store.set(f"gone/{self.node}", "1")
                self._await_others(signals, self._nodes.ttl_s + patience_s)
            elif self._key and not self._is_done():
                self._write(f"{self.node}#{_LEFT}")
        self._store.close()

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
        """Renew what this node has, and look at what others have."""
        begun = time.monotonic()
        if self._key and not self._is_done():
            self._count += 1
            self._write(f"{self.node}#{_DONE if self._is_finished else self._count}")
        closed = self._store.get(_CLOSED)
        if closed is not None:
            self._closed = tuple(json.loads(closed))
            self._on_renewed(float("inf"))  # no node takes the place any more
            return
        self._on_renewed(begun)
        is_idle = self.place is None or self._is_done()
        for place in self._watched(is_idle=is_idle):
            if self._is_held(place) and not is_idle:
                break
        if not self._key and not self._nodes.is_store_only:
            self._wait_as_spare()
        if is_idle and all(self._ended(f"place/{p}") for p in range(self._nodes.num_nodes)):
            self.close(0, "")

    def _pause(self) -> None:
        """Until the next renewal is due, or there is news from another thread."""
        self._has_news.wait(self._nodes.ttl_s / _RENEWALS_PER_TTL)
        self._has_news.clear()

    def _watched(self, *, is_idle: bool) -> Iterator[int]:
        """All places where this node has nothing to do, else those before its own.

        Of these the nearest that is held is enough: its node looks at those before it.
        """
        size, own = self._nodes.num_nodes, self.place
        if own is not None and not is_idle:
            yield from ((own - step) % size for step in range(1, size))
            return
        wanted = self._nodes.node_rank
        if wanted is not None and wanted < size:
            yield wanted
        yield from range(size)

    def _is_held(self, place: int) -> bool:
        """Whether a node renews the place.

        If there is none, and this node is a spare, it takes the place; where the time is over, it
        ends the job.
        """
        key = f"place/{place}"
        value, silent_s = self._look(key)
        node, _, state = value.partition("#")
        if state == _DONE:
            return False
        if value and state != _LEFT and silent_s < self._nodes.ttl_s:
            return True
        name = node.rpartition(":")[0]
        why = (
            f"node {name} has left" if state == _LEFT else f"node {name} no longer renews its place"
        )
        if value and self._lost.get(place) != value:
            self._lost[place] = value
            self._on_note(f"place {place}: {why}")
            self._store.set(f"gone/{node}", "1")
            self._end_round(place, why)
        is_waiting = self.place is None and not self._nodes.is_store_only
        if is_waiting and self._take(key, value):
            self.place = place
            if value:
                self._end_round(place, why)  # which its workers may have joined meanwhile
        elif silent_s > self._nodes.ttl_s + self._nodes.wait_s:
            what = why if value else "no node has come"
            self.close(
                NODE_MISSING,
                f"place {place}: {what}, and none has taken the place within "
                f"{self._nodes.wait_s:g} s (--node-wait); start the job again",
            )
        return False

    def _look(self, key: str) -> tuple[str, float]:
        """What a key holds, and for how long it has been seen to hold that."""
        value, now = self._store.get(key) or "", time.monotonic()
        if self._seen.get(key, (None,))[0] != value:
            self._seen[key] = value, now
        return value, now - self._seen[key][1]

    def _ended(self, key: str) -> bool:
        return self._seen.get(key, ("",))[0].endswith(f"#{_DONE}")

    def _is_done(self) -> bool:
        return self._written.endswith(f"#{_DONE}")

    def _wait_as_spare(self) -> None:
        """Take one of the spare nodes' keys, so that the limit of spare nodes holds.

        Raises a RestartError if all have been taken for longer than a node is waited for.
        """
        for number in range(self._nodes.num_spare_nodes):
            key = f"spare/{number}"
            value, silent_s = self._look(key)
            is_free = not value or value.endswith(f"#{_LEFT}") or silent_s > self._nodes.ttl_s
            if is_free and self._take(key, value):
                self._on_spare()
                return
        if time.monotonic() - self._began > self._nodes.wait_s:
            raise RestartError(
                f"all {self._nodes.num_nodes} places and those of {self._nodes.num_spare_nodes} "
                "spare nodes are taken by other nodes; raise --spare-nodes, or leave this node out"
            )

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


def connected_store(nodes: Nodes, on_note: Callable[[str], object]) -> JobStore:
    """A client of the job's store, which may come as late as a node may; else a PeerLostError."""
    deadline = time.monotonic() + nodes.wait_s
    host, port = nodes.endpoint
    is_waiting = False
    while True:
        try:
            # Torch's client would write a trace to stderr for an address that does not answer.
            socket.create_connection(nodes.endpoint, nodes.fence_s).close()
            return JobStore(host, port, timeout_s=2 * nodes.fence_s)
        except (OSError, PeerLostError) as error:
            why = f"the rendezvous store at {host}:{port} does not answer: {error}"
            if time.monotonic() > deadline:
                raise PeerLostError(None, why) from error
        if not is_waiting:
            on_note(f"{why}; it may come within {nodes.wait_s:g} s (--node-wait)")
        is_waiting = True
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
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False
