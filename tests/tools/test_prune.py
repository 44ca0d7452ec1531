"""Old checkpoints and what killed saves have left go; nothing else does, and never by halves."""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies import SavePolicy, TieredCheckpointManager
from dist_ckpt_strategies.errors import PlanError, StorageError
from dist_ckpt_strategies.tools.prune import PruneDecision, Status, build_prune_plan, prune
from tests.support.checkpoints import (
    WEIGHT,
    contents,
    copied,
    names_in,
    write_checkpoint,
    write_foreign_checkpoint,
    write_object,
    write_packs,
)
from tests.support.disks import NOBODY, without_root
from tests.support.system_calls import dying_at_change

OLD_S = 7200


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of everything, not to be changed."""
    root = tmp_path_factory.mktemp("samples")
    write_packs(root / "packs")
    (write_packs(root / "packs_unfinished") / ".partial-0").write_bytes(b"x")
    for name in ("index", "common.pt", "metadata.json"):
        (root / "packs_unfinished" / name).unlink()
    write_checkpoint(root / "one")
    marker = write_checkpoint(root / "one_unfinished") / "metadata.json"
    marker.rename(marker.with_name(".removed-metadata.json"))
    (write_checkpoint(root / "one_unknown") / "metadata.json").unlink()
    return root


def age(directory: Path, seconds: float = OLD_S) -> Path:
    """Make everything in it old."""
    then = time.time() - seconds
    for path in (directory, *directory.rglob("*")):
        os.utime(path, (then, then), follow_symlinks=False)
    return directory


def put(sample: Path, root: Path, number: int) -> Path:
    """A copy of a sample as the checkpoint of an iteration, a little younger than those before."""
    return age(copied(sample, root / f"iter_{number:07d}"), OLD_S - number)


def statuses(root: Path) -> dict[str, Status]:
    """What a prune that removes nothing says of each directory."""
    return {one.name: one.status for one in prune(root).kept}


@pytest.mark.parametrize("sample", ["one", "packs"])
@pytest.mark.parametrize("keeping", [{"keep_last": 1}, {"keep_last": 2}, {"keep_every": 1000}])
def test_an_incomplete_checkpoint_never_causes_older_ones_to_be_pruned(
    sample: str, keeping: dict[str, Any], samples: Path, tmp_path: Path
) -> None:
    places = [put(samples / sample, tmp_path, number) for number in range(5, 10)]
    pattern = {"one": f"{WEIGHT}/0.0", "packs": "packs/*/*"}[sample]
    next(places[4].glob(pattern)).unlink()
    path = next(places[3].glob(pattern))
    path.write_bytes(path.read_bytes()[:-1])
    (places[2] / "notes.txt").write_text("mine")

    report = prune(tmp_path, **keeping)

    num_kept = keeping.get("keep_last", 1)
    assert names_in(tmp_path) == [f"iter_{number:07d}" for number in range(8 - num_kept, 10)]
    statuses = {one.name[-1]: one.status for one in report.kept}
    assert (statuses["9"], statuses["8"]) == (Status.DAMAGED, Status.DAMAGED)
    assert statuses["7"] is Status.COMPLETE


@pytest.mark.parametrize("sample", ["one_unfinished", "packs_unfinished", "empty"])
def test_files_of_a_killed_save_are_removed_once_they_are_old(
    sample: str, samples: Path, tmp_path: Path
) -> None:
    place = tmp_path / "iter_0000005"
    if sample == "empty":
        place.mkdir()  # killed early
    else:
        (put(samples / sample, tmp_path, 5) / "common.pt").touch()  # somebody still writes

    assert prune(tmp_path, unfinished=True).removed == ()
    age(place)
    assert prune(tmp_path, keep_last=1).removed == ()
    assert len(prune(tmp_path, unfinished=True).removed) == 1
    assert names_in(tmp_path) == []


def test_what_a_link_beside_it_leads_to_stays(samples: Path, tmp_path: Path) -> None:
    for number in range(5, 10):
        put(samples / "packs", tmp_path, number)
    (tmp_path / "best").symlink_to("iter_0000006")
    (tmp_path / "elsewhere").symlink_to(samples / "one")
    (tmp_path / "dangling").symlink_to("iter_0000004")
    (tmp_path / "loop").symlink_to("loop")

    report = prune(tmp_path, keep_last=1)

    assert [one.name[-1] for one in report.kept] == ["6", "9"]
    assert report.kept[0].why == "the link best leads to it"


def test_nothing_goes_that_is_not_known_to_be_ours(samples: Path, tmp_path: Path) -> None:
    write_foreign_checkpoint(tmp_path / "iter_0000001")
    for name in ("iter_0000002", "empty", "tensorboard"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000002" / "__0_0.distcp").write_bytes(b"x")
    copied(samples / "one_unknown", tmp_path / "data set")  # somebody's Zarr arrays
    put(samples / "one_unknown", tmp_path, 3)
    (put(samples / "one", tmp_path, 4) / "metadata.json").write_text("{")
    (tmp_path / "iter_0000007").symlink_to(samples / "packs")
    copied(samples / "packs", tmp_path / "best")
    age(copied(samples / "one_unfinished", tmp_path / "killed"))
    (tmp_path / "wandb.log").write_text("x")
    before = names_in(age(tmp_path))

    assert set(statuses(tmp_path).values()) == {Status.OTHER}
    report = prune(tmp_path, keep_last=1, keep_every=1000, unfinished=True, older_than_s=0)

    assert report.removed == ()
    assert names_in(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize(
    ("unreadable", "removed", "sample"),
    [
        ("iter_0000001", "53", "packs"),
        ("iter_0000001/metadata.json", "53", "one"),
        ("iter_0000004/below", "51", "packs"),
        ("iter_0000005/below", "13", "one"),
    ],
)
def test_an_unreadable_directory_stays_is_listed_and_does_not_count(
    unreadable: str, removed: str, sample: str, samples: Path
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "lost+found").mkdir()
        for number in (1, 2, 3, 4):
            put(samples / sample, root, number)
        put(samples / f"{sample}_unfinished", root, 5)
        below = {"one": WEIGHT, "packs": "packs"}[sample]
        for path in (root, *root.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        locked = root / unreadable.replace("below", below)
        locked.chmod(0)
        with without_root():
            report = prune(root, keep_last=1, keep_every=2, unfinished=True, older_than_s=0)
        name = Path(unreadable).parts[0]
        kept = {one.name: one for one in report.kept}

        assert [one.name[-1] for one in report.removed] == list(removed)
        assert kept[name].status is Status.UNREADABLE
        assert kept[name].why.startswith("cannot be read: ")
        assert "permission denied" in kept[name].why.lower()
        locked.chmod(0o755)
        assert len(names_in(root)) == 6 - len(removed)
        root.chmod(0)
        with without_root(), pytest.raises(StorageError, match=str(root)):
            prune(root, keep_last=1)
        root.chmod(0o755)


@pytest.mark.parametrize("sample", ["one", "packs"])
def test_a_checkpoint_in_place_of_its_parent_is_refused(
    sample: str, samples: Path, tmp_path: Path
) -> None:
    place = put(samples / sample, tmp_path, 1)
    with pytest.raises(PlanError, match="name the directory that holds it"):
        prune(place, keep_last=1, unfinished=True)


# Files of others


def state_of(value: float, key: str) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets(key, torch.full((8, 4), value)),
        "o": ShardedObject("o", value, (1,), (0,)),
        "value": value,
    }


def put_beside(root: Path) -> dict[str, bytes]:
    """Arrays at several depths, an object's file and others, none of them of the checkpoint."""
    before = contents(root)
    for key in ("scores", "eval/scores", "eval/1/2/losses"):
        zarr.create_array(root / key, data=np.arange(4.0), zarr_format=2)
    write_object(root / "eval" / "shard_0_1.pt", {"seen": 7})
    for name in ("notes.txt", "export/metadata.json", "export/model.safetensors"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("mine")
    return {name: content for name, content in contents(root).items() if name not in before}


def put_within(root: Path) -> dict[str, bytes]:
    """A note in each of the checkpoint's own directories."""
    notes = [folder / "notes.txt" for folder in root.rglob("*") if folder.is_dir()]
    for note in notes:
        note.write_text("mine")
    return {str(note.relative_to(root)): b"mine" for note in notes}


def replace_it(root: Path) -> None:
    dist_ckpt_strategies.save(state_of(2, "other"), root, overwrite=True)


def prune_it(root: Path) -> None:
    dist_ckpt_strategies.save(state_of(2, "w"), root.with_name("iter_0000002"))
    assert [one.name for one in prune(root.parent, keep_last=1).removed] == [root.name]


def have_a_manager_remove_it(root: Path) -> None:
    policy = SavePolicy(every_steps=1, keep_last=1)
    with TieredCheckpointManager(root.parent, policy=policy) as manager:
        for step in (2, 3):
            manager.save(step, state_of(step, "w"))
    assert manager.all_steps() == [3]


WAYS = [replace_it, prune_it, have_a_manager_remove_it]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_part_of_packs_stays_when_they_go(
    way: Callable[[Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "iter_0000001"
    dist_ckpt_strategies.save(state_of(1, "w"), root)
    others = put_within(root) | put_beside(root)

    way(root)

    left = contents(root)
    assert {name: left.get(name) for name in others} == others


class KilledError(BaseException):
    """Stands for the end of the process."""


def killed() -> None:
    raise KilledError


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["one", "packs"])
def test_a_prune_that_is_killed_leaves_nothing_that_looks_whole(
    sample: str, samples: Path, tmp_path: Path
) -> None:
    for iteration in (1, 2):
        put(samples / sample, tmp_path / "first", iteration)
    prune(tmp_path / "first", keep_last=1)  # else an import may write a file of its own
    number, was_killed = 0, True
    while was_killed:
        root = tmp_path / str(number)
        for iteration in (1, 2):
            put(samples / sample, root, iteration)
        was_killed = True
        with suppress(KilledError), dying_at_change(number + 1, killed):
            prune(root, keep_last=1)
            was_killed = False
        is_whole = number == 0 or (root / "iter_0000001" / "index").exists()
        expected = Status.COMPLETE if is_whole else Status.UNFINISHED
        is_left = (root / "iter_0000001").exists()
        if is_left and any((root / "iter_0000001").iterdir()):
            assert statuses(root)["iter_0000001"] is expected, number
        prune(root, keep_last=1, unfinished=True, older_than_s=0)
        empty = [path.name for path in root.iterdir() if not any(path.iterdir())]
        assert set(names_in(root)) - set(empty) == {"iter_0000002"}, number
        number += 1
    assert number > 10


Policy = dict[str, Any]


def of(iteration: int, status: Status = Status.COMPLETE, **fields: Any) -> PruneDecision:
    fields = {"age_s": 10_000.0 - iteration} | fields
    return PruneDecision(f"iter_{iteration:07d}", iteration, status, **fields)


def unfinished(iteration: int, age_s: float = 3600.0) -> PruneDecision:
    return of(iteration, Status.UNFINISHED, age_s=age_s)


RUN = [of(100 * n) for n in range(1, 8)]
YOUNG_AND_OLD = [unfinished(900, 3599.0), unfinished(800)]
DAMAGED = [of(n, Status.DAMAGED) for n in (150, 550, 800)]
WENT_BACK = [of(100, is_named=True), of(200), of(300, age_s=1.0), of(400), of(500)]


@pytest.mark.parametrize(
    ("found", "policy", "removed"),
    [
        (RUN[::-1], Policy(last=3), [100, 200, 300, 400]),
        (RUN, Policy(last=100), []),
        (RUN, Policy(last=1, every=300), [100, 200, 400, 500]),
        (RUN, Policy(every=300), [100, 200, 400, 500]),
        ([*RUN, unfinished(900)], Policy(unfinished=True), [900]),
        ([*RUN[:2], unfinished(900)], Policy(last=1), [100]),
        (YOUNG_AND_OLD, Policy(last=1), []),
        (YOUNG_AND_OLD, Policy(unfinished=True), [800]),
        (YOUNG_AND_OLD, Policy(unfinished=True, older_than_s=0), [800, 900]),
        ([*RUN, *DAMAGED], Policy(last=2), [100, 150, 200, 300, 400, 500, 550]),
        ([*RUN, *DAMAGED], Policy(last=3), [100, 150, 200, 300, 400]),
        ([*RUN, *DAMAGED], Policy(unfinished=True), []),
        (DAMAGED, Policy(last=1), []),
        (WENT_BACK, Policy(last=1), [200, 300, 400]),
    ],
)
def test_the_order_in_which_checkpoints_are_removed(
    found: list[PruneDecision], policy: Policy, removed: list[int]
) -> None:
    plan = build_prune_plan(found, **policy)
    assert [one.iteration for one in plan if one.is_removed] == removed


@pytest.mark.parametrize("policy", [Policy(last=0), Policy(every=0), Policy(older_than_s=-1)])
def test_numbers_that_cannot_be_meant_are_refused(policy: Policy) -> None:
    with pytest.raises(PlanError, match="expected"):
        build_prune_plan(RUN, **policy)


@given(
    st.lists(
        st.builds(
            PruneDecision,
            st.text("ab", min_size=1),
            st.none() | st.integers(0, 50),
            st.sampled_from(Status),
            st.floats(0, 10_000),
            st.none(),
            st.booleans(),
        ),
        unique_by=lambda found: found.name,
    ),
    st.fixed_dictionaries(
        {
            "last": st.none() | st.integers(1, 5),
            "every": st.none() | st.integers(1, 5),
            "unfinished": st.booleans(),
            "older_than_s": st.floats(0, 10_000),
        }
    ),
)
def test_whatever_is_asked_for_the_newest_and_what_is_not_ours_stay(
    found: list[PruneDecision], policy: Policy
) -> None:
    plan = build_prune_plan(found, **policy)
    gone = {decision.name for decision in plan if decision.is_removed}
    complete = [one for one in found if one.status is Status.COMPLETE]

    assert sorted(decision.name for decision in plan) == sorted(one.name for one in found)
    for one in (one for one in found if one.name in gone):
        assert one.status is not Status.OTHER
        assert one.iteration is not None or one.status is Status.UNFINISHED
        assert one.status is not Status.UNFINISHED or one.age_s >= policy["older_than_s"]
    if complete:
        newest = max(complete, key=lambda one: -1 if one.iteration is None else one.iteration)
        kept = [one.iteration for one in complete if one.name not in gone]
        assert newest.iteration in kept
        assert len(kept) >= min(len(complete), policy["last"] or 1)
    assert build_prune_plan(found[::-1], **policy) == plan
