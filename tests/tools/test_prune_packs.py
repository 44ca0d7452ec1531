"""``prune`` over packs: what no index names goes once it is old; a checkpoint goes index first."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.tools.prune import Status, prune
from tests.support.checkpoints import names_in
from tests.support.killed import OBJECTS, in_memory, recorded

PACKS = ("safetensors", 1)
OLD_S = 7200
BUCKET = "memory://bucket/run"


def save(place: Any, value: float = 1.0) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value)), "value": value}
    dist_ckpt_strategies.save(state, place, PACKS, overwrite=True)


def value_in(place: Any) -> Any:
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
    found: Any = dist_ckpt_strategies.load(wanted, place)
    assert np.all(found["w"].numpy() == found["value"])
    return found["value"]


def age(root: Path) -> None:
    then = time.time() - OLD_S
    for path in root.rglob("*"):
        os.utime(path, (then, then))


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A run with a checkpoint, and every state of it during another save."""
    root = tmp_path / "run"
    save(root / "iter_0000001", 1.0)
    with recorded(root, tmp_path / "states") as states:
        save(root / "iter_0000001", 2.0)
    return root, states


@pytest.mark.slow
def test_what_killed_saves_left_goes_and_the_checkpoint_stays(
    killed: tuple[Path, list[Path]],
) -> None:
    root, states = killed
    removed = 0
    for state in states:
        shutil.rmtree(root)
        shutil.copytree(state, root)
        before, value = names_in(root), value_in(root / "iter_0000001")
        young = prune(root, unfinished=True)
        assert (names_in(root), young.removed) == (before, ())
        age(root)
        kept = prune(root, keep_last=1)
        dry = prune(root, unfinished=True, dry_run=True)
        assert (names_in(root), kept.removed) == (before, ())
        done = prune(root, unfinished=True)
        assert [one.files for one in dry.removed] == [one.files for one in done.removed]
        removed += len(done.removed)
        assert value_in(root / "iter_0000001") == value
        left = [p for p in (root / "iter_0000001").rglob("*") if p.is_file()]
        known = {"index", "common.pt", "metadata.json", ".dist-ckpt-commit"}
        assert len([path for path in left if path.suffix == ".safetensors"]) == 1
        assert {path.name for path in left if path.suffix != ".safetensors"} == known
    assert removed > 3


def test_a_killed_first_save_goes_wholly(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with recorded(root, tmp_path / "states") as states:
        save(root / "iter_0000001")
    statuses = set()
    for state in states:
        shutil.rmtree(root)
        shutil.copytree(state, root)
        is_visible = (root / "iter_0000001" / "index").exists()
        age(root)
        report = prune(root, unfinished=True)
        statuses.add(report.removed[0].status if report.removed else report.kept[0].status)
        if not is_visible and report.removed:
            assert not (root / "iter_0000001").exists()
        elif is_visible:
            assert value_in(root / "iter_0000001") == 1.0
    assert Status.COMPLETE in statuses
    assert Status.UNFINISHED in statuses


@pytest.fixture(params=["directory", "bucket"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Three checkpoints, and files of others in the first."""
    root = tmp_path / "run" if request.param == "directory" else BUCKET
    for number in range(1, 4):
        save(f"{root}/iter_{number:07d}", float(number))
    if request.param == "directory":
        age(tmp_path)
        (tmp_path / "run" / "iter_0000001" / "packs" / "mine.txt").write_text("x")
    else:
        OBJECTS[f"{BUCKET}/iter_0000001/packs/mine.txt"] = b"x"
    yield root
    in_memory({})


def test_old_ones_go_and_files_of_others_stay(run: Any) -> None:
    for damage in (False, True):
        if damage and isinstance(run, Path):
            next(run.glob("iter_0000003/packs/*/*")).unlink()
        elif damage:
            del OBJECTS[next(n for n in OBJECTS if "iter_0000003/packs" in n)]
        dry = prune(run, keep_last=2, dry_run=True)
        assert [one.name for one in dry.removed] == ([] if damage else ["iter_0000001"])
        if not damage:
            done = prune(run, keep_last=2)
            assert [(one.name, one.stays) for one in done.removed] == [("iter_0000001", ("packs",))]
    assert value_in(f"{run}/iter_0000002") == 2.0
    assert {one.name: one.status for one in prune(run).kept}["iter_0000003"] is Status.DAMAGED


def test_in_a_bucket_the_age_is_that_of_the_start_of_the_save() -> None:
    save(f"{BUCKET}/iter_0000001", 1.0)
    orphans = {name: content for name, content in OBJECTS.items() if "/packs/" in name}
    save(f"{BUCKET}/iter_0000001", 2.0)
    OBJECTS.update(orphans)
    assert prune(BUCKET, unfinished=True).removed == ()
    assert prune(BUCKET, unfinished=True, older_than_s=0, dry_run=True).removed != ()
    assert orphans.keys() <= OBJECTS.keys()
    (gone,) = prune(BUCKET, unfinished=True, older_than_s=0).removed
    assert len(gone.files) == 1
    assert not orphans.keys() & OBJECTS.keys()
    assert value_in(f"{BUCKET}/iter_0000001") == 2.0
    in_memory({})


def test_a_lost_index_is_no_killed_save(tmp_path: Path) -> None:
    save(tmp_path / "iter_0000001", 1.0)
    save(tmp_path / "iter_0000002", 2.0)
    (tmp_path / "iter_0000001" / "index").unlink()
    age(tmp_path)
    report = prune(tmp_path, unfinished=True)
    assert report.removed == ()
    assert report.kept[0].status is Status.DAMAGED
    assert [one.name for one in prune(tmp_path, keep_last=1).removed] == ["iter_0000001"]
    assert not (tmp_path / "iter_0000001").exists()
