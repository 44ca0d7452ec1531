"""Servers that fail, answer late or go away, and ranks that are killed: never half a checkpoint."""

import os
import random
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageTimeoutError,
    StoreAccessError,
)
from dist_ckpt_strategies.strategies.safetensors import PackLoadShardedStrategy
from tests.stores.commands import ONE_SERVER, differing
from tests.support.entries import PACKS, Failure, outcome, require_refused
from tests.support.faulty_proxy import BUSY, DENIED, NONE, Fault, FaultyProxy, Request
from tests.support.object_stores import Radosgw
from tests.support.ranks import run_processes
from tests.support.sharding import Cut, on_grid, state_of

SIZE = 2


def cuts(generation: int, size: int = SIZE) -> list[Cut]:
    """Some arrays; those of another generation have other elements."""
    return [on_grid(f"w{number}.{generation}", (8, 4), (2, 1), size=size) for number in range(3)]


def save(
    rank: int, variables: dict[str, str], url: str, generation: int, timeout_s: float = 100.0
) -> Any:
    os.environ.update(variables)
    state = state_of(rank, cuts(generation))
    act = partial(dist_ckpt_strategies.save, overwrite=True, timeout_s=timeout_s)
    return outcome(lambda: act(state, url, PACKS))


def load(
    rank: int, variables: dict[str, str], url: str, generation: int, timeout_s: float = 100.0
) -> Any:
    """What is differing, or the Failure; by its own options the strategy would wait longer."""
    os.environ.update(variables)
    patient = PackLoadShardedStrategy(options=Options(timeout_s=1800))
    return outcome(lambda: differing(url, cuts(generation), patient, rank, timeout_s=timeout_s))


def save_and_load(rank: int, variables: dict[str, str], url: str) -> list[Any]:
    return [save(rank, variables, url, 1), load(rank, variables, url, 1)]


@ONE_SERVER
def test_a_server_that_is_busy_slow_or_cuts_answers_is_asked_again(
    proxy: FaultyProxy, bucket: str
) -> None:
    chance = random.Random(5)

    def decide(request: Request) -> Fault:
        return chance.choice([BUSY, Fault(delay_s=0.1), Fault(is_cut=True), *[NONE] * 7])

    with proxy.faulty(decide):
        results = run_processes(SIZE, save_and_load, proxy.store.variables, f"s3://{bucket}/run")

    assert results == [[None, []]] * SIZE


@pytest.mark.parametrize(
    ("act", "fault", "limits_s", "said"),
    [
        (save, BUSY, (4, 100.0), "within 4 s"),
        (save, Fault(delay_s=30), (4, 100.0), "within 4 s"),
        (save, Fault(delay_s=60), (120, 20.0), "did not answer within .* raise timeout_s"),
        (load, Fault(delay_s=60), (120, 20.0), "did not answer within .* raise timeout_s"),
    ],
    ids=["busy", "silent", "silent for longer than peers wait", "the same in a load"],
)
@ONE_SERVER
def test_a_server_that_fails_for_good_is_reported_in_time_by_all_ranks(
    proxy: FaultyProxy,
    bucket: str,
    act: Callable[..., Any],
    fault: Fault,
    limits_s: tuple[int, float],
    said: str,
) -> None:
    """In time, too: before peers give up on a rank that waits for the store."""
    store_s, peers_s = limits_s
    url = f"s3://{bucket}/run"
    begun: list[Request] = []
    variables = proxy.store.variables | {"DIST_CKPT_STORE_TIMEOUT_S": f"{store_s}"}
    if act is load:
        assert run_processes(SIZE, save, variables, url, 1) == [None] * SIZE

    def decide(request: Request) -> Fault:
        begun.extend([request] * ("/packs/" in request.path or store_s > peers_s))
        return fault if begun else NONE

    with proxy.faulty(decide):
        results = run_processes(SIZE, act, variables, url, 1, peers_s)

    for rank, result in enumerate(results):
        assert isinstance(result, Failure), (rank, result)
        assert StorageTimeoutError.__name__ in result.kinds, (rank, result)
        assert (f"{url}/" if store_s < peers_s else url) in result.text
        assert re.search(said, result.text, re.DOTALL)
        assert result.seconds < 3 * min(limits_s) + 50
    if act is save:
        with pytest.raises((IncompleteCheckpointError, CheckpointNotFoundError)):
            differing(url, cuts(1, size=1))


@ONE_SERVER
def test_the_requests_of_a_commit_share_one_limit(proxy: FaultyProxy, bucket: str) -> None:
    timeout_s, delay_s = 3.0, 1.2  # a request of its own may take 2.25 s
    began: list[float] = []

    def decide(request: Request) -> Fault:
        if request.method == "PUT" and request.path.endswith(("/metadata.json", "/index")):
            began.append(time.monotonic())
        return Fault(delay_s=delay_s) if began else NONE

    state = state_of(0, cuts(1, size=1))
    with proxy.faulty(decide):
        outcome(lambda: dist_ckpt_strategies.save(state, f"s3://{bucket}/run", timeout_s=timeout_s))
        assert time.monotonic() - began[0] < timeout_s + delay_s + 1.0


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
        if not restarts and request.method == "PUT" and "/packs/" in request.path:
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


@ONE_SERVER
def test_a_save_to_a_new_url_needs_rights_to_put_read_and_list_alone(
    proxy: FaultyProxy, bucket: str
) -> None:
    """No object is put twice either, as in a bucket whose objects stay as they were written."""
    url, cut = f"s3://{bucket}/run", on_grid("w", (4, 4), (1, 1))
    put: set[str] = set()

    def write_once(request: Request) -> Fault:
        if request.method == "DELETE" or (request.method == "PUT" and request.path in put):
            return DENIED
        put.update([request.path] if request.method == "PUT" else [])
        return NONE

    with proxy.faulty(write_once):
        dist_ckpt_strategies.save(state_of(0, [cut]), f"{url}/one", PACKS)
        dist_ckpt_strategies.save(state_of(0, [cut]), f"{url}/two", overwrite=True)
        dist_ckpt_strategies.save_async(state_of(0, [cut]), f"{url}/three", PACKS).wait()
        with pytest.raises(StoreAccessError, match=r"one/index.*to put"):
            dist_ckpt_strategies.save(state_of(0, [cut]), f"{url}/one", overwrite=True)

    for name in ("one", "two", "three"):
        assert differing(f"{url}/{name}", [cut]) == []


@ONE_SERVER
@pytest.mark.parametrize("lost", ["packs/", "saves/"])
def test_what_a_server_acknowledges_and_loses_is_noticed_before_the_commit(
    lost: str, proxy: FaultyProxy, bucket: str
) -> None:
    def one_rank(generation: int) -> list[Cut]:
        return cuts(generation, size=1)

    def decide(request: Request) -> Fault:
        is_lost = request.method == "PUT" and f"/{lost}" in request.path
        return Fault(status=200) if is_lost else NONE

    url = f"s3://{bucket}/run"
    act = partial(dist_ckpt_strategies.save, checkpoint_dir=url, overwrite=True)
    act(state_of(0, one_rank(1)))
    with proxy.faulty(decide):
        require_refused(lambda: act(state_of(0, one_rank(2))), IncompleteCheckpointError, lost)
    assert differing(url, one_rank(1)) == []


@ONE_SERVER
@pytest.mark.parametrize(
    ("name", "has_earlier"),
    [("/run/saves/", False), ("/run/index", True)],
)
def test_a_late_request_of_a_failed_save_does_not_change_the_next_one(
    proxy: FaultyProxy, bucket: str, name: str, has_earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put is given up, another save succeeds, then the server carries the put out."""
    url = f"s3://{bucket}/run"
    late: list[str] = []

    def save(value: float) -> None:
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((8, 4), value))}
        dist_ckpt_strategies.save(state, url, overwrite=True)

    def loaded() -> list[float]:
        wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8, 4))}
        found: Any = dist_ckpt_strategies.load(wanted, url)
        return sorted(found["w"].unique().tolist())

    def decide(request: Request) -> Fault:
        if request.method != "PUT" or name not in request.path:
            return NONE
        late.append(request.path)
        return Fault(delay_s=4.0)

    if has_earlier:
        save(0.0)
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "2")
    with proxy.faulty(decide), pytest.raises(StorageTimeoutError):
        save(1.0)
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "60")
    if has_earlier:
        assert loaded() == [0.0]
    save(2.0)
    assert loaded() == [2.0]
    assert late
    time.sleep(4.0)
    assert loaded() == [2.0]
