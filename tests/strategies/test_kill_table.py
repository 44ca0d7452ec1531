"""Kills, delays, two savers, readers beside them: a place of packs never holds a mixture.

``docs/kill_table.md`` says what a kill leaves; the tests read it there.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies import prune
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageTimeoutError,
)
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy
from tests.support.entries import (
    ZARR,
    Entry,
    Failure,
    load,
    outcome,
    prepare,
    require_on_ranks,
    require_refused,
)
from tests.support.killed import (
    BEFORE_WRITES,
    OBJECTS,
    STATES,
    copied_to,
    in_memory,
    no_writer_process,
    recorded,
    signature,
    with_halves,
)
from tests.support.processes import until
from tests.support.ranks import RankDiedError, done_by, run_processes
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

PACKS = ("safetensors", 1)
PAGE = Path(__file__).parents[2] / "docs" / "kill_table.md"


def state_of(value: float, rank: int = 0, size: int = 1, key: str = "x") -> dict[str, Any]:
    """Two arrays that ranks share, an object, and common state, all of one value."""
    rows = torch.full((64 // size, 8), value)
    return {
        "w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, size)),
        "x": ShardedTensor.from_rank_offsets(key, rows.double(), (0, rank, size)),
        "o": ShardedObject("o", value, (1,), (0,), replica_id=rank),
        "value": value,
    }


def value_in(
    root: Any, entry: Entry = Entry.OURS, rank: int = 0, size: int = 1, key: str = "x"
) -> Any:
    """The value that everything in a checkpoint holds; a list where it differs."""
    found = load(entry, state_of(-1.0, rank, size, key), root)
    values = {*found["w"].unique().tolist(), *found["x"].unique().tolist()}
    values |= {found["o"], found["value"]}
    return values.pop() if len(values) == 1 else sorted(values)


def save_ours(root: Any, value: float, *, is_async: bool = False) -> None:
    act = dist_ckpt_strategies.save_async if is_async else dist_ckpt_strategies.save
    request = act(state_of(value), root, PACKS, overwrite=True)
    if request is not None:
        request.wait()


def save_megatrons(root: Path, value: float, *, is_async: bool = False) -> None:
    root.mkdir(exist_ok=True)
    request = dist_checkpointing.save(
        state_of(value), str(root), PACKS, async_sharded_save=is_async
    )
    if request is not None:
        request.wait()


WAYS: dict[str, tuple[str, Callable[..., None]]] = {
    "ours": ("our save", save_ours),
    "ours, async": ("our save", partial(save_ours, is_async=True)),
    "megatrons": ("Megatron's save", save_megatrons),
    "megatrons, async": ("Megatron's save", partial(save_megatrons, is_async=True)),
}


def table(heading: str, saver: str) -> dict[str, tuple[str, str]]:
    """What a table of the page says, by the moment of the kill, of our reader and Megatron's."""
    text = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    _, _, *rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in re.findall(r"^\|.*", text, re.MULTILINE)
    ]
    start = {"our save": 1, "Megatron's save": 3}[saver]
    return {row[0]: (row[start], row[start + 1]) for row in rows if row[start]}


def files(state: Any) -> dict[str, bytes]:
    """What a state holds, by name below the checkpoint."""
    if isinstance(state, Path):
        return {str(p.relative_to(state)): p.read_bytes() for p in state.rglob("*") if p.is_file()}
    return {name.removeprefix(f"{URL}/"): content for name, content in state.items()}


URL = "memory://bucket/run/c"


def moment(
    state: dict[str, bytes], old: dict[str, bytes], new: dict[str, bytes], saver: str
) -> str:
    """The last thing that the save has done, in the words of the page."""

    def packs(of: dict[str, bytes], folder: str) -> set[str]:
        return {name for name in of if name.startswith(folder)}

    def is_new(name: str) -> bool:
        return name in state and state[name] == new[name] and state[name] != old.get(name)

    cut = {name for name in state if name in new and len(state[name]) < len(new[name])}
    stays = packs(old, "packs/") | packs(old, "saves/")
    facts = {
        "half of `common.pt`": "common.pt" in cut,
        "`common.pt`": is_new("common.pt"),
        "a pack, the gather": bool(packs(state, "packs/") - packs(old, "packs/")),
        "the full index": bool(packs(state, "saves/") - packs(old, "saves/")),
        "`index`": is_new("index"),
        "the copy in `common.pt`": is_new("common.pt"),
        "half of the deletion": bool(stays - state.keys()),
        "half of `metadata.json`": "metadata.json" in cut,
        "the end": state.keys() == new.keys() and not cut and is_new("index"),
    }
    if saver == "our save":
        facts["`common.pt`"] = False
    else:
        facts["the copy in `common.pt`"] = False
    return ([name for name, is_so in facts.items() if is_so] or ["nothing"])[-1]


def seen(root: Any, entry: Entry, key: str = "x") -> Any:
    """``old``, ``new`` or ``incomplete``; anything else as it is."""
    found = outcome(partial(value_in, root, entry, key=key))
    if isinstance(found, Failure):
        expected = {"IncompleteCheckpointError", "CheckpointNotFoundError"}
        return "incomplete" if entry is Entry.MEGATRON or expected & {*found.kinds} else found
    return {"1.0": "old", "2.0": "new"}.get(str(found), str(found))


def kill_everywhere(  # noqa: PLR0915 - one state after the other
    rank: int, scratch: Path, way: str, over: bool, place: str
) -> None:
    """Each state that a kill can leave is as the page says, and the next save succeeds."""
    no_writer_process()
    saver, save = WAYS[way]
    root: Any = scratch / "c" if place == "directory" else URL
    old: dict[str, bytes] = {}
    if over:
        save(root, 1.0)
        old = files(root) if place == "directory" else files(STATES[-1])
    if place == "directory":
        with recorded(root, scratch / "states") as copies:
            save(root, 2.0)
        names = ("common.pt", "metadata.json") if saver == "Megatron's save" else ()
        states: list[Any] = with_halves(copies, names)
    else:
        begin = len(STATES)
        save(root, 2.0)
        states = STATES[begin:]
    new = files(states[-1])
    expected = table("Over an older checkpoint" if over else "Into a new directory", saver)
    occurred: set[str] = set()
    readers = [*Entry] if place == "directory" else [Entry.OURS]
    for state in states:
        at = moment(files(state), old, new, saver)
        occurred.add(at)
        if place == "directory":
            copied_to(state, root)
        else:
            in_memory(state)
        before = signature(root) if place == "directory" else dict(state)
        found = {entry: seen(root, entry) for entry in readers}
        assert before == (signature(root) if place == "directory" else dict(state)), at
        nothing = "old" if over else "incomplete"
        ours, megatrons = expected.get(at, (nothing, nothing))
        wanted = {Entry.OURS: ours, Entry.MEGATRON: megatrons}
        assert found == {entry: wanted[entry] for entry in readers}, (state, at)
        save(root, 3.0)
        assert {value_in(root, entry) for entry in readers} == {3.0}, (state, at)
    if place == "directory":
        assert occurred >= expected.keys(), (occurred, expected)


@pytest.mark.parametrize("over", [True, False], ids=["over an old one", "new"])
@pytest.mark.parametrize(
    ("way", "place"),
    [*((way, "directory") for way in WAYS), ("ours", "bucket"), ("ours, async", "bucket")],
)
def test_a_kill_at_any_change_leaves_what_the_page_says(
    way: str, place: str, over: bool, tmp_path: Path
) -> None:
    require_on_ranks(1, kill_everywhere, tmp_path, way, over, place)


def kill_over_another_format(rank: int, scratch: Path, way: str) -> None:
    """Packs replace a checkpoint of format 1: no reader gets parts of both."""
    no_writer_process()
    saver, save = WAYS[way]
    root = scratch / "c"
    dist_ckpt_strategies.save(state_of(1.0), root, ZARR)
    untouched = files(root) | {"common.pt": b""}
    with recorded(root, scratch / "states") as states:
        save(root, 2.0)
    allowed = {"old", "new"} if saver == "our save" else {"old", "new", "incomplete"}
    for state in states:
        copied_to(state, root)
        before = signature(root)
        found = seen(root, Entry.OURS), seen(root, Entry.MEGATRON)
        # Megatron-Core has written common.pt, and not yet called the strategy.
        is_mixed = saver != "our save" and files(state) | {"common.pt": b""} == untouched
        if not is_mixed:
            assert found[0] in allowed, (state, found)
            assert found[1] in {*allowed, "incomplete"}, (state, found)
        assert before == signature(root), (state, found)
        save(root, 3.0)
        assert {value_in(root, entry) for entry in Entry} == {3.0}, (state, found)


@pytest.mark.parametrize("way", ["ours, async", "megatrons"])
def test_a_kill_while_another_format_is_replaced_leaves_no_mixture(
    way: str, tmp_path: Path
) -> None:
    require_on_ranks(1, kill_over_another_format, tmp_path, way)


def kill_over(rank: int, scratch: Path, older: tuple[str, int] | None) -> None:
    """Format 1 in a new directory, or over a checkpoint in which one array has another key."""
    root, save = scratch / "c", dist_ckpt_strategies.save
    if older is not None:
        save(state_of(1.0, key="n/old"), root, older)
    with recorded(root, scratch / "states") as states:
        save(state_of(2.0, key="n/new"), root, ZARR, overwrite=older is not None)
    found: list[str] = []
    for state in states:
        copied_to(state, root)
        before = signature(root)
        prune(root.parent, keep_last=1, unfinished=True, older_than_s=0, dry_run=True)
        of_keys = {seen(root, Entry.OURS, key) for key in ("n/old", "n/new")}
        found += [one for one in of_keys if isinstance(one, str) and one != "incomplete"] or [
            "none"
        ]
        assert before == signature(root), (state, of_keys)
        # Megatron-Core, which goes by the marker, takes a missing chunk for zeros.
        is_marked = (root / "metadata.json").exists()
        assert older == PACKS or is_marked == (found[-1] != "none"), (state, of_keys)
        save(state_of(3.0), root, overwrite=True)
        assert value_in(root) == 3.0, (state, of_keys)
    assert len(found) == len(states) > 10
    first = "none" if older is None else "old"
    order = [one for one, _ in groupby(found)]
    assert order in ([first, "new"], [first, "none", "new"]), found


@pytest.mark.parametrize("older", [None, ZARR, PACKS], ids=str)
def test_a_kill_in_a_save_of_format_1_leaves_the_old_one_the_new_one_or_none(
    older: tuple[str, int] | None, tmp_path: Path
) -> None:
    require_on_ranks(1, kill_over, tmp_path, older)


def die_alone(rank: int, root: Path, victim: int, call: str, what: str) -> Any:
    """One of two ranks dies at a call; the other learns of it."""
    prepare(60)
    save = dist_ckpt_strategies.save
    save(state_of(1.0, rank, 2), root, PACKS)
    if rank != victim:
        return outcome(partial(save, state_of(2.0, rank, 2), root, PACKS, overwrite=True))

    def die(_name: str, path: str) -> None:
        if re.search(what, path):
            os._exit(9)

    with before_calls(die, [call]):
        return outcome(partial(save, state_of(2.0, rank, 2), root, PACKS, overwrite=True))


def load_and_save_again(rank: int, root: Path, found: list[float]) -> None:
    first = value_in(root, rank=rank, size=2)
    assert first in found, first
    dist.barrier()
    dist_ckpt_strategies.save(state_of(3.0, rank, 2), root, PACKS, overwrite=True)
    dist.barrier()
    assert value_in(root, rank=rank, size=2) == 3.0


@pytest.mark.parametrize(
    ("victim", "call", "what", "value"),
    [
        (1, "writev", "packs/", 1.0),
        (0, "open", "/saves/", 1.0),
        (0, "replace", r"/\.partial-", 1.0),
        (0, "unlink", "packs/", 2.0),
    ],
)
def test_one_rank_that_is_killed_harms_nothing(
    victim: int, call: str, what: str, value: float, tmp_path: Path
) -> None:
    results = run_processes(2, die_alone, tmp_path / "c", victim, call, what)
    assert isinstance(results[victim], RankDiedError)
    assert isinstance(results[1 - victim], Failure), results
    require_on_ranks(2, load_and_save_again, tmp_path / "c", [value])


# Late calls


LIMIT_S = 3.0


def carry_out_late(
    rank: int, root: Path, backend: tuple[str, int], way: str, late: tuple[str, str, int]
) -> None:
    """A call of a save is carried out after the save was given up, and after another try."""
    no_writer_process()
    woken, stalled = threading.Event(), threading.Event()
    call, what, nth = late
    left = [nth]

    def stall(_name: str, path: str) -> None:
        if str(root) in path and re.search(what, path) and not stalled.is_set():
            left[0] -= 1
            if left[0] == 0:
                stalled.set()
                woken.wait(60)

    def save(value: float, **options: Any) -> None:
        act = dist_ckpt_strategies.save_async if way == "async" else dist_ckpt_strategies.save
        request = act(state_of(value), root, backend, overwrite=True, **options)
        if request is not None:
            request.wait()

    save(1.0)
    with before_calls(stall, [call]):
        require_refused(partial(save, 2.0, timeout_s=LIMIT_S), StorageTimeoutError)
        between = outcome(partial(value_in, root))
        assert between in {1.0, 2.0}, between
        other = outcome(partial(save, 3.0, timeout_s=LIMIT_S))
        assert not isinstance(other, Failure) or "StorageTimeoutError" in other.kinds, other
        woken.set()
        save(4.0)
        assert {value_in(root, entry) for entry in Entry} == {4.0}
    until(lambda: not [t for t in threading.enumerate() if t.name == "dist-ckpt-io"])
    assert {value_in(root, entry) for entry in Entry} == {4.0}


CHUNK, PACK = r"\.partial-.*/w/0\.0$", "packs/"


@pytest.mark.parametrize(
    ("backend", "way", "late"),
    [
        (PACKS, "sync", ("open", "/saves/", 1)),
        (PACKS, "sync", ("replace", r"/\.partial-", 1)),
        (PACKS, "sync", ("replace", r"/\.partial-", 2)),
        (PACKS, "sync", ("fsync", r"/c$", 1)),
        (PACKS, "sync", ("unlink", PACK, 1)),
        (PACKS, "sync", ("open", PACK, 1)),
        (PACKS, "async", ("writev", PACK, 1)),
        (ZARR, "sync", ("open", CHUNK, 1)),
        (ZARR, "async", ("writev", CHUNK, 1)),
    ],
    ids=str,
)
def test_a_call_of_a_save_that_was_given_up_harms_nothing(
    backend: tuple[str, int], way: str, late: tuple[str, str, int], tmp_path: Path
) -> None:
    require_on_ranks(1, carry_out_late, tmp_path / "c", backend, way, late)


def put_late(rank: int) -> None:
    """In a bucket the request that replaces ``index`` is carried out after another save."""
    woken, stalled = threading.Event(), threading.Event()
    save_ours(URL, 1.0)

    def stall(path: str) -> None:
        if path == f"{URL}/index" and not stalled.is_set():
            stalled.set()
            woken.wait(60)

    BEFORE_WRITES.append(stall)
    again = partial(dist_ckpt_strategies.save, overwrite=True, timeout_s=LIMIT_S)
    failure = outcome(partial(again, state_of(2.0), URL, PACKS))
    assert isinstance(failure, Failure)
    again(state_of(3.0), URL, PACKS)
    assert value_in(URL) == 3.0
    woken.set()
    until(lambda: not [t for t in threading.enumerate() if t.name == "dist-ckpt-io"])
    assert value_in(URL) == 2.0, "whole, though older"
    late, _ = sorted(name for name in OBJECTS if "/saves/" in name)
    del OBJECTS[late]  # as the save does that replaces it
    assert value_in(URL) == 3.0, "the whole save with the largest id counts"
    save_ours(URL, 4.0)
    assert value_in(URL) == 4.0


def test_a_late_request_for_the_index_leaves_a_whole_save(tmp_path: Path) -> None:
    require_on_ranks(1, put_late)


# Clocks


def save_with_a_clock_behind(rank: int, scratch: Path) -> None:
    now = time.time_ns
    for root in (scratch / "c", URL):
        save_ours(root, 1.0)
        with pytest.MonkeyPatch.context() as changes:
            changes.setattr(time, "time_ns", lambda: now() - 86_400 * 10**9)
            changes.setattr(time, "time", lambda: now() / 1e9 - 86_400)
            save_ours(root, 2.0)
            assert value_in(root) == 2.0
        save_ours(root, 3.0)
        assert value_in(root) == 3.0
    assert len([name for name in OBJECTS if "/saves/" in name]) == 1
    assert len(list((scratch / "c").glob("saves/*/index"))) == 1


def test_a_clock_that_is_a_day_behind_changes_nothing(tmp_path: Path) -> None:
    require_on_ranks(1, save_with_a_clock_behind, tmp_path)


# Several at one place


def read_together(rank: int, root: Path, over: Path) -> tuple[list[Any], list[Failure]]:
    """Loads until a file appears; both ranks stop after the same load."""
    prepare(60)
    values: list[Any] = []
    failures: list[Failure] = []
    is_over = torch.zeros(1)
    while not is_over.item():
        found = outcome(partial(value_in, root, rank=rank, size=2))
        (failures if isinstance(found, Failure) else values).append(found)
        is_over.fill_(float(over.exists()))
        dist.all_reduce(is_over, op=dist.ReduceOp.MAX)
    return values, failures


def test_readers_beside_two_savers_never_see_a_mixture(tmp_path: Path) -> None:
    root, over = tmp_path / "c", tmp_path / "over"
    refused: list[Failure] = []
    save_ours(root, 0.0)

    def save_often(number: int) -> None:
        strategy = PackSaveShardedStrategy()
        save = partial(dist_ckpt_strategies.save, sharded_strategy=strategy, overwrite=True)
        values = count(100 + number, 100)
        while not over.exists():
            found = outcome(partial(save, state_of(float(next(values))), root))
            refused.extend([found] if isinstance(found, Failure) else [])

    savers = [threading.Thread(target=save_often, args=(n,)) for n in range(2)]
    timer = threading.Timer(5.0, over.touch)
    for thread in (*savers, timer):
        thread.start()
    try:
        results = done_by(2, read_together, root, over)
    finally:
        over.touch()
        for thread in (*savers, timer):
            thread.join()
    for values, failures in results:
        assert all(isinstance(value, float) for value in values), values
        assert len(set(values)) > 1
        assert all("CheckpointChangedError" in f.kinds for f in failures), failures
    assert all("another save" in failure.text for failure in refused), refused
    last = value_in(root)
    assert isinstance(last, float)
    save_ours(root, 7.0)
    assert value_in(root) == 7.0


# A rank that sees an older state of the directory


def load_with_a_stale_view(rank: int, scratch: Path, seen: str, is_late: bool) -> None:
    """Each rank reaches the place by a link of its own; that of rank 1 leads to an older state."""
    now, before, link = scratch / "now", scratch / "before", scratch / f"view{rank}"
    save = partial(dist_ckpt_strategies.save, sharded_strategy=PACKS, overwrite=True)
    save(state_of(1.0, rank, 2), now)
    dist.barrier()
    if rank == 0:
        if seen != "nothing":
            shutil.copytree(now, before)
        if seen == "no index":
            (before / "index").unlink()
    dist.barrier()
    save(state_of(2.0, rank, 2), now)
    dist.barrier()
    link.symlink_to(now if rank == 0 else before)

    def look_again() -> None:
        other = scratch / "other"
        other.symlink_to(now)
        other.replace(link)

    timer = threading.Timer(2.0, look_again)
    if rank == 1 and is_late:
        timer.start()
    act = partial(dist_ckpt_strategies.load, state_of(-1.0, rank, 2), link)
    if is_late:
        assert value_in(link, rank=rank, size=2) == 2.0
    else:
        refusals = {"nothing": CheckpointNotFoundError, "no index": IncompleteCheckpointError}
        kind = refusals.get(seen, CheckpointChangedError)
        assert require_refused(partial(act, timeout_s=6.0), kind).seconds > 2.0


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("seen", ["an older save", "no index", "nothing"])
def test_a_stale_view_is_waited_for_and_never_read(
    seen: str, is_late: bool, tmp_path: Path
) -> None:
    require_on_ranks(2, load_with_a_stale_view, tmp_path, seen, is_late)
