"""Nodes of a job in one process: who gets which place, keeps it, loses it, and takes it over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import PeerLostError, PlanError, RestartError, StorageError
from dist_ckpt_strategies.formats.commit import DirectoryPlace
from dist_ckpt_strategies.inprocess.coordinator import FaultMode
from dist_ckpt_strategies.inprocess.places import NODE_MISSING, Nodes, Places
from dist_ckpt_strategies.inprocess.store_coordinator import RestartState
from tests.support.ports import HOST, free_port
from tests.support.processes import until
from tests.support.ranks import run_processes

TTL_S = 3.0
LIMIT_S = 60.0


class Job:
    """A job of this many nodes, whose agents are threads of this process."""

    def __init__(self, num_nodes: int, **options: Any) -> None:
        self.port = free_port()
        self._fields = {"num_nodes": num_nodes, "num_ranks": 2, "ttl_s": TTL_S, **options}
        self._pool = ThreadPoolExecutor(8)
        self.nodes: list[Node] = []

    def node(self, **options: Any) -> Node:
        nodes = Nodes(endpoint=(HOST, self.port), **{**self._fields, **options})
        self.nodes.append(Node(nodes, self._pool))
        return self.nodes[-1]

    def placed(self, num_nodes: int) -> list[Node]:
        """Nodes that come one after the other, so that the first has the first place."""
        placed = []
        for expected in range(num_nodes):
            placed.append(self.node())
            assert placed[-1].place() == expected
        return placed

    def end(self) -> None:
        for node in self.nodes:
            node.places.stop()
        self._pool.shutdown()
        for number, node in reversed(list(enumerate(self.nodes))):
            if number:
                node.places._host = None  # which one process can be several times
            node.places.shutdown()


class Node:
    """Its agent, as far as places go; ``code`` is what ``hold`` returns, or raises."""

    def __init__(self, nodes: Nodes, pool: ThreadPoolExecutor) -> None:
        self.renewed: list[float] = []
        self.notes: list[str] = []
        self.is_spare = False
        self.places = Places(nodes, self.renewed.append, self._note_spare, self.notes.append)
        self.got: Future[int] = Future()
        self.end: Future[tuple[int, str]] = pool.submit(self._live)

    def _note_spare(self) -> None:
        self.is_spare = True

    def _live(self) -> tuple[int, str]:
        try:
            place = self.places.take()
        except BaseException as error:
            self.got.set_exception(error)
            raise
        assert place is not None
        self.got.set_result(place)
        return self.places.hold()

    def place(self) -> int:
        return self.got.result(LIMIT_S)

    def falls_silent(self) -> None:
        self.places.stop()
        self.end.result(LIMIT_S)

    def leaves(self) -> None:
        self.falls_silent()
        self.places.shutdown()


@pytest.fixture
def job_of() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(num_nodes: int, **options: Any) -> Job:
        jobs.append(Job(num_nodes, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def test_each_node_gets_a_place_and_the_job_ends_when_all_have_finished(
    job_of: Callable[..., Job],
) -> None:
    job = job_of(2, num_spare_nodes=1)
    first = job.node(node_rank=1)
    assert first.place() == 1
    second = job.node()
    assert second.place() == 0
    spare = job.node()
    until(lambda: spare.is_spare)

    first.places.finish()
    until(first.places._is_done)
    assert not second.end.done()
    second.places.finish()

    assert [node.end.result(LIMIT_S) for node in (first, second)] == [(0, "")] * 2
    until(lambda: spare.places._closed is not None)


def test_a_silent_node_loses_its_place_to_a_spare_and_can_neither_renew_nor_commit(
    job_of: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(2, num_spare_nodes=1)
    other, lost = job.placed(2)
    spare = job.node()
    until(lambda: spare.is_spare)
    state = RestartState(JobStore(HOST, job.port))
    for rank in range(4):
        state.join(1, f"worker{rank}", rank)
    monkeypatch.setenv("DIST_CKPT_COORDINATOR", f"{HOST}:{job.port}")
    monkeypatch.setenv("DIST_CKPT_PLACE", f"place/1={lost.places.node}")
    commit_to(tmp_path / "before")

    lost.falls_silent()

    assert spare.place() == 1
    fault = state.fault(1)
    assert fault is not None
    assert (fault.global_rank, fault.mode) == (2, FaultMode.DEATH)
    assert lost.places.node.rpartition(":")[0] in fault.why
    lost.places._is_stopped = False
    with pytest.raises(PeerLostError, match="place/1 of this node belongs to node"):
        lost.places.hold()
    with pytest.raises(StorageError, match=f"{spare.places.node}'s now"):
        commit_to(tmp_path / "after")
    assert not (tmp_path / "after" / "metadata.json").exists()
    assert not other.end.done()


def commit_to(directory: Path) -> None:
    place = DirectoryPlace(directory, Options(), keeps_old=True, overwrite=False)
    place.save_id = place.new_save_id()
    place.begin(())
    place.commit(b"{}")


@pytest.mark.multiprocess
def test_a_commit_without_its_place_fails_on_all_ranks(tmp_path: Path) -> None:
    host = host_store()
    JobStore(host.host, host.port).set("place/0", "other#7")

    found = run_processes(2, _save_as_lost, f"{host.host}:{host.port}", tmp_path)

    assert all("place/0 of the job was node lost's, and is other's now" in text for text in found)
    assert not list(tmp_path.glob("**/metadata.json"))


def _save_as_lost(_rank: int, address: str, directory: Path) -> str:
    os.environ |= {"DIST_CKPT_COORDINATOR": address, "DIST_CKPT_PLACE": "place/0=lost"}
    with pytest.raises(StorageError) as caught:
        dist_ckpt_strategies.save({"step": 1}, directory)
    return str(caught.value)


def test_a_place_that_is_left_is_taken_at_once(job_of: Callable[..., Job]) -> None:
    job = job_of(2, num_spare_nodes=1, ttl_s=300.0)
    _first, second = job.placed(2)
    spare = job.node()
    until(lambda: spare.is_spare)
    second.leaves()
    spare.places._has_news.set()  # it would look every 30 s

    assert spare.place() == 1


@pytest.mark.parametrize("comes", [True, False])
def test_a_node_that_none_replaces_ends_the_job_everywhere_by_its_name(
    comes: bool, job_of: Callable[..., Job]
) -> None:
    job = job_of(3, wait_s=1.0)
    rest = job.placed(2)
    name = "no node has come"
    if comes:
        lost = job.node()
        assert lost.place() == 2
        lost.falls_silent()
        name = lost.places.node.rpartition(":")[0]

    for node in rest:
        code, why = node.end.result(LIMIT_S)
        assert code == NODE_MISSING
        assert "place 2: " in why
        assert name in why


def test_a_node_too_many_is_refused(job_of: Callable[..., Job]) -> None:
    job = job_of(1, num_spare_nodes=1)
    assert job.node().place() == 0
    spare = job.node()
    until(lambda: spare.is_spare)

    with pytest.raises(RestartError, match=r"1 places and those of 1 spare nodes"):
        job.node(wait_s=0.5).place()


def test_a_node_with_other_options_is_refused(job_of: Callable[..., Job]) -> None:
    job = job_of(2)
    assert job.node().place() == 0

    with pytest.raises(PlanError, match=r"another job.*--nnodes.*2.*--nnodes.*3"):
        job.node(num_nodes=3)
