"""Servers that fail, answer late or go away, and ranks that are killed: never half a checkpoint."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.config import Credentials, Options, StoreOptions
from dist_ckpt_strategies.core.chunk_grids import MAX_OBJECT_NBYTES
from dist_ckpt_strategies.errors import (
    IncompleteCheckpointError,
    StoreAccessError,
    StoreUnreachableError,
)
from dist_ckpt_strategies.formats.locations import is_finished, located
from dist_ckpt_strategies.strategies.zarr import Format2LoadShardedStrategy
from tests.support.entries import Failure, outcome
from tests.support.faulty_proxy import BUSY, DENIED, NONE, Fault, FaultyProxy, Request
from tests.support.object_stores import ObjectStore, Radosgw
from tests.support.ranks import RankDiedError, run_processes
from tests.support.sharding import Cut, differences, no_data, on_grid, part_of, state_of

pytestmark = pytest.mark.multiprocess

SIZE = 2
FORMAT2 = ("zarr", 2)
BOUND_S = 4.0
PEERS_S = 20.0


def cuts(generation: int) -> list[Cut]:
    """Some arrays; those of another generation have other elements."""
    return [on_grid(f"w{number}.{generation}", (8, 4), (2, 1), size=SIZE) for number in range(3)]


def begin(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    os.environ["DIST_CKPT_TIMEOUT_S"] = "100"


def save(rank: int, variables: dict[str, str], url: str, generation: int) -> Any:
    begin(variables)
    state = state_of(rank, cuts(generation))
    return outcome(lambda: dist_ckpt_strategies.save(state, url, FORMAT2, overwrite=True))


def load(rank: int, variables: dict[str, str], url: str, generation: int) -> Any:
    """Names of what came back otherwise than it was saved, or the Failure."""
    begin(variables)
    wanted = cuts(generation)

    def differing() -> list[str]:
        found: Any = dist_ckpt_strategies.load(state_of(rank, wanted, no_data), url)
        return differences(rank, wanted, found)

    return outcome(differing)


def save_and_load(rank: int, variables: dict[str, str], url: str) -> list[Any]:
    return [save(rank, variables, url, 1), load(rank, variables, url, 1)]


def options_of(store: ObjectStore) -> Options:
    """To look at what is there, from this process, as anybody."""
    anybody = StoreOptions(store.endpoint, credentials=Credentials.ANONYMOUS, timeout_s=60)
    return Options(store=anybody)


@pytest.fixture
def proxy(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, for this process too."""
    with FaultyProxy(store) as found:
        for name, value in found.store.variables.items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_a_server_that_is_busy_slow_or_cuts_answers_is_asked_again(
    proxy: FaultyProxy, bucket: str
) -> None:
    chance = random.Random(5)

    def decide(request: Request) -> Fault:
        return chance.choice([BUSY, Fault(delay_s=0.1), Fault(is_cut=True), *[NONE] * 7])

    with proxy.faulty(decide):
        results = run_processes(SIZE, save_and_load, proxy.store.variables, f"s3://{bucket}/run")

    assert results == [[None, []]] * SIZE


@pytest.mark.parametrize("fault", [BUSY, Fault(delay_s=30)], ids=["busy", "silent"])
@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_a_server_that_fails_for_good_is_given_up_in_time_by_all_ranks(
    proxy: FaultyProxy, bucket: str, fault: Fault
) -> None:
    """From some request of the save on."""
    variables = proxy.store.variables | {"DIST_CKPT_STORE_TIMEOUT_S": f"{BOUND_S}"}
    url = f"s3://{bucket}/run"

    seen: list[Request] = []

    def decide(request: Request) -> Fault:
        if "w1" in request.path:
            seen.append(request)
        return fault if seen else NONE

    with proxy.faulty(decide):
        results = run_processes(SIZE, save, variables, url, 1)

    for rank, result in enumerate(results):
        assert isinstance(result, Failure), (rank, result)
        assert StoreUnreachableError.__name__ in result.kinds, (rank, result)
        assert f"{url}/" in result.text
        assert f"within {BOUND_S:g} s" in result.text
        assert result.seconds < 3 * BOUND_S + 50
    assert not is_finished(located(url, options_of(proxy.store)))


def attempt(rank: int, variables: dict[str, str], url: str, does_save: bool) -> Any:
    """A save, or a load, that does not wait as long for peers as for the store.

    The strategy of the load would, by its own options.
    """
    os.environ.update(variables)
    state: Any = state_of(rank, cuts(2), part_of if does_save else no_data)
    if does_save:
        return outcome(
            lambda: dist_ckpt_strategies.save(state, url, overwrite=True, timeout_s=PEERS_S)
        )
    patient = Format2LoadShardedStrategy(options=Options(timeout_s=1800))
    return outcome(lambda: dist_ckpt_strategies.load(state, url, patient, timeout_s=PEERS_S))


@pytest.mark.parametrize("does_save", [True, False], ids=["save", "load"])
@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_a_silent_server_is_reported_before_peers_give_up_on_its_rank(
    proxy: FaultyProxy, bucket: str, does_save: bool
) -> None:
    """They would know of a late rank alone, and their process group would be gone."""
    url = f"s3://{bucket}/run"
    variables = proxy.store.variables | {"DIST_CKPT_STORE_TIMEOUT_S": "120"}
    assert run_processes(SIZE, save, variables, url, 2) == [None] * SIZE

    with proxy.faulty(lambda _: Fault(delay_s=60)):
        results = run_processes(SIZE, attempt, variables, url, does_save)

    for rank, result in enumerate(results):
        assert isinstance(result, Failure), (rank, result)
        assert StoreUnreachableError.__name__ in result.kinds, (rank, result)
        assert url in result.text
        assert "leaves them unanswered" in result.text
        assert "timeout_s of the save or load" in result.text


def save_with_pid(
    rank: int, variables: dict[str, str], url: str, generation: int, pids: Path
) -> Any:
    (pids / str(rank)).write_text(str(os.getpid()))
    return save(rank, variables, url, generation)


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_a_killed_save_leaves_nothing_that_counts_as_a_checkpoint(
    proxy: FaultyProxy, bucket: str, tmp_path: Path
) -> None:
    """Every rank is killed at some put of a save over an earlier one; the next save goes well."""
    variables, url = proxy.store.variables, f"s3://{bucket}/run"
    for generation, name in enumerate(["w1.0/c.", "index.json", "metadata.json"]):

        def decide(request: Request, name: str = name) -> Fault:
            if request.method == "PUT" and name in request.path:
                for pid in tmp_path.iterdir():
                    kill(int(pid.read_text()))
            return NONE

        with proxy.faulty(decide):
            results = run_processes(SIZE, save_with_pid, variables, url, generation, tmp_path)
        assert all(isinstance(result, RankDiedError) for result in results), (name, results)
        left = outcome(partial(loaded_alone, url, generation))
        is_refused = isinstance(left, Failure) and IncompleteCheckpointError.__name__ in left.kinds
        assert is_refused or (name == "metadata.json" and left == []), (name, left)
    assert run_processes(SIZE, save_and_load, variables, url) == [[None, []]] * SIZE


def loaded_alone(url: str, generation: int) -> list[str]:
    """Names of what this process alone finds otherwise than it was saved."""
    wanted = [on_grid(cut.key, cut.shape, (1, 1), size=1) for cut in cuts(generation)]
    found: Any = dist_ckpt_strategies.load(state_of(0, wanted, no_data), url)
    return differences(0, wanted, found)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # by a request before


def test_a_real_server_that_is_killed_and_started_again_has_the_whole_checkpoint(
    radosgw: Radosgw,
) -> None:
    url = f"{radosgw.store.make_bucket('killed-and-started')}/run"
    restarts: list[threading.Thread] = []

    def restart() -> None:
        radosgw.kill_gateway()
        time.sleep(0.5)
        radosgw.start_gateway()

    def decide(request: Request) -> Fault:
        if not restarts and request.method == "PUT" and "w2.1/c." in request.path:
            restarts.append(threading.Thread(target=restart))
            restarts[0].start()
            return Fault(delay_s=0.1)
        return NONE

    with FaultyProxy(radosgw.store) as proxy, proxy.faulty(decide):
        variables = proxy.store.variables | {"DIST_CKPT_STORE_TIMEOUT_S": "60"}
        saved = run_processes(SIZE, save, variables, url, 1)
        restarts[0].join()
    loaded = run_processes(SIZE, load, radosgw.store.variables, url, 1)

    assert saved == [None] * SIZE
    assert loaded == [[]] * SIZE


# One process

LATE_S = 4.0


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_who_may_put_read_and_list_saves_to_a_new_url(proxy: FaultyProxy, bucket: str) -> None:
    """No object is put twice either, as in a bucket whose objects stay as they were written."""
    url, cut = f"s3://{bucket}/run", on_grid("w", (4, 4), (1, 1))
    put: set[str] = set()

    def write_once(request: Request) -> Fault:
        if request.method == "DELETE" or (request.method == "PUT" and request.path in put):
            return DENIED
        put.update([request.path] if request.method == "PUT" else [])
        return NONE

    with proxy.faulty(write_once):
        for name, overwrite in (("one", False), ("two", True)):
            dist_ckpt_strategies.save(
                state_of(0, [cut]), f"{url}/{name}", FORMAT2, overwrite=overwrite
            )
        dist_ckpt_strategies.save_async(state_of(0, [cut]), f"{url}/three", FORMAT2).wait()
        with pytest.raises(StoreAccessError, match=r"one/metadata\.json.*to put"):
            dist_ckpt_strategies.save(state_of(0, [cut]), f"{url}/one", FORMAT2, overwrite=True)

    for name in ("one", "two", "three"):
        loaded: Any = dist_ckpt_strategies.load(state_of(0, [cut], no_data), f"{url}/{name}")
        assert differences(0, [cut], loaded) == []


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_a_load_of_a_part_asks_for_little_more_than_it_needs(
    proxy: FaultyProxy, bucket: str
) -> None:
    """A column quarter of a matrix of 16 MiB."""
    url = f"s3://{bucket}/run"
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2048, 2048))}
    dist_ckpt_strategies.save(state, url, FORMAT2)
    proxy.requests.clear()

    quarter = ShardedTensor.from_rank_offsets("w", torch.ones(2048, 512), (1, 1, 4))
    loaded: Any = dist_ckpt_strategies.load({"w": quarter}, url)

    assert not loaded["w"].any()
    of_chunks = [r for r in proxy.requests if "/arrays/" in r.path]
    assert sum(r.nbytes for r in of_chunks) <= 1.1 * 4 * 2048 * 512
    assert len(of_chunks) <= 8
    assert sum("/manifest/part" in r.path for r in proxy.requests) == 1


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_a_large_tensor_goes_in_several_objects(proxy: FaultyProxy, bucket: str) -> None:
    rows = math.ceil(2.5 * MAX_OBJECT_NBYTES / (1 << 20))
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(rows, 1 << 20, dtype=torch.int8))}

    dist_ckpt_strategies.save(state, f"s3://{bucket}/run", FORMAT2)

    sizes = [r.nbytes for r in proxy.requests if r.method == "PUT" and "/arrays/w/c." in r.path]
    assert len(sizes) >= 3
    assert max(sizes) <= MAX_OBJECT_NBYTES + (4 << 20)
    part = torch.zeros(3, 1 << 20, dtype=torch.int8)
    wanted = ShardedTensor("w", part, part.dtype, (3, 1 << 20), (rows, 1 << 20), (62, 0), None)
    loaded: Any = dist_ckpt_strategies.load({"w": wanted}, f"s3://{bucket}/run")
    assert loaded["w"].all()


@pytest.mark.parametrize("store", ["moto"], indirect=True)
@pytest.mark.parametrize(
    ("name", "generation"),
    [("/arrays/w/c.0.0", 1), ("/manifest/index.json", 0), ("/run/metadata.json", 1)],
)
def test_a_late_request_of_a_failed_save_does_not_change_the_next_one(
    proxy: FaultyProxy,
    bucket: str,
    name: str,
    generation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A put is given up, another save succeeds, then the server carries the put out."""
    url = f"s3://{bucket}/run"
    late: list[str] = []

    def save(value: float) -> None:
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((8, 4), value))}
        dist_ckpt_strategies.save(state, url, FORMAT2, overwrite=True)

    def loaded() -> list[float]:
        wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8, 4))}
        found: Any = dist_ckpt_strategies.load(wanted, url)
        return sorted(found["w"].unique().tolist())

    def decide(request: Request) -> Fault:
        if request.method != "PUT" or not request.path.endswith(name):
            return NONE
        late.append(request.path)
        return Fault(delay_s=LATE_S)

    if generation:
        save(0.0)
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "2")
    with proxy.faulty(decide), pytest.raises(StoreUnreachableError):
        save(1.0)
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "60")
    if generation:
        assert loaded() == [0.0]
    save(2.0)
    assert loaded() == [2.0]
    time.sleep(LATE_S)
    assert late
    assert loaded() == [2.0]
