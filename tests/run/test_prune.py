"""Old checkpoints and what killed saves have left go; nothing else does, and never by halves."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CheckpointNotFoundError, PlanError
from dist_ckpt_strategies.plan.prune import Standing
from dist_ckpt_strategies.run.prune import prune
from dist_ckpt_strategies.storage.lifecycle.pruning import find_checkpoints, look_at
from tests.support.checkpoints import copied, write_checkpoint, write_foreign_checkpoint
from tests.support.format2_checkpoints import write_format2

OLD_S = 7200


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of everything, not to be changed."""
    root = tmp_path_factory.mktemp("samples")
    write_format2(root / "two")
    write_format2(root / "two_unfinished", is_finished=False)
    (root / "two_unfinished" / ".partial-0").write_bytes(b"x")
    write_checkpoint(root / "one")
    write_checkpoint(root / "one_unfinished")
    (root / "one_unfinished" / "metadata.json").unlink()
    return root


def age(directory: Path, seconds: float = OLD_S) -> Path:
    """Make everything in it old."""
    then = time.time() - seconds
    for at, _, names in os.walk(directory):
        for path in (at, *(f"{at}/{name}" for name in names)):
            os.utime(path, (then, then), follow_symlinks=False)
    return directory


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def standings(root: Path) -> dict[str, Standing]:
    return {one.name: one.standing for one in find_checkpoints(root, time.time())}


def test_checkpoints_of_both_formats_go_but_for_the_last(samples: Path, tmp_path: Path) -> None:
    for number, sample in enumerate(("one", "two", "one", "two")):
        age(copied(samples / sample, tmp_path / f"iter_{number:07d}"), OLD_S - number)

    report = dist_ckpt_strategies.prune(tmp_path, keep_last=2)

    assert names_in(tmp_path) == ["iter_0000002", "iter_0000003"]
    assert [one.name for one in report.removed] == ["iter_0000000", "iter_0000001"]
    assert report.nbytes > 1 << 20
    assert [one.found.name for one in report.kept] == ["iter_0000002", "iter_0000003"]


def test_a_dry_run_removes_nothing(samples: Path, tmp_path: Path) -> None:
    for number in range(2):
        age(copied(samples / "two", tmp_path / f"iter_{number:07d}"), OLD_S - number)

    report = prune(tmp_path, keep_last=1, dry_run=True)

    assert [one.name for one in report.removed] == ["iter_0000000"]
    assert names_in(tmp_path) == ["iter_0000000", "iter_0000001"]


@pytest.mark.parametrize("sample", ["one", "two"])
@pytest.mark.parametrize("keeping", [{"keep_last": 1}, {"keep_last": 2}, {"keep_every": 1000}])
def test_what_lacks_a_file_is_not_what_older_ones_go_for(
    sample: str, keeping: dict[str, Any], samples: Path, tmp_path: Path
) -> None:
    places = [
        age(copied(samples / sample, tmp_path / f"iter_{number:07d}"), OLD_S - number)
        for number in range(5, 10)
    ]
    chunks = [p for p in sorted(places[4].rglob("*")) if re.fullmatch(r"c?[0-9.]+", p.name)]
    chunks[0].unlink()
    cut = [p for p in sorted(places[3].rglob("*")) if re.fullmatch(r"c?[0-9.]+", p.name)]
    cut[0].write_bytes(cut[0].read_bytes()[:-1])
    (places[2] / "notes.txt").write_text("mine")

    report = prune(tmp_path, **keeping)

    num_kept = keeping.get("keep_last", 1)
    assert names_in(tmp_path) == [f"iter_{number:07d}" for number in range(8 - num_kept, 10)]
    standings = {one.found.name[-1]: one.found.standing for one in report.kept}
    assert (standings["9"], standings["8"]) == (Standing.DAMAGED, Standing.DAMAGED)
    assert standings["7"] is Standing.COMPLETE


@pytest.mark.parametrize("sample", ["one_unfinished", "two_unfinished"])
def test_what_a_killed_save_left_goes_once_it_is_old(
    sample: str, samples: Path, tmp_path: Path
) -> None:
    place = copied(samples / sample, tmp_path / "iter_0000005")
    age(place)
    (place / "common.pt").touch()  # somebody still writes

    assert prune(tmp_path, unfinished=True).removed == ()
    age(place)
    assert prune(tmp_path, keep_last=1).removed == ()
    assert len(prune(tmp_path, unfinished=True).removed) == 1
    assert names_in(tmp_path) == []


def make_strangers(root: Path, samples: Path) -> None:
    """Directories that are no checkpoint of ours, or not for certain."""
    write_foreign_checkpoint(root / "iter_0000001")
    (root / "iter_0000002").mkdir()
    (root / "iter_0000002" / "__0_0.distcp").write_bytes(b"x")
    copied(samples / "one_unfinished", root / "data set")  # somebody's Zarr arrays
    copied(samples / "one_unfinished", root / "iter_0000003")
    (root / "iter_0000003" / "notes.txt").write_text("mine")
    copied(samples / "two", root / "iter_0000004")
    (root / "iter_0000004" / "metadata.json").write_text("{")
    copied(samples / "two", root / "iter_0000006")
    (root / "iter_0000006" / "manifest" / "index.json").unlink()
    copied(samples / "two_unfinished", root / "iter_0000008")
    (root / "iter_0000008" / ".partial-conversion.jsonl").write_bytes(b"")  # to be resumed
    (root / "tensorboard").mkdir()
    (root / "iter_0000007").symlink_to(samples / "two")
    (root / "wandb.log").write_text("x")


def test_nothing_goes_that_is_not_known_to_be_ours(samples: Path, tmp_path: Path) -> None:
    make_strangers(tmp_path, samples)
    before = names_in(age(tmp_path))

    assert set(standings(tmp_path).values()) == {Standing.OTHER}
    report = prune(tmp_path, keep_last=1, keep_every=1000, unfinished=True, older_than_s=0)

    assert report.removed == ()
    assert names_in(tmp_path) == before


def test_files_of_others_in_a_checkpoint_stay(samples: Path, tmp_path: Path) -> None:
    old = copied(samples / "two", tmp_path / "iter_0000001")
    (old / "train_dataloader.pt").write_bytes(b"x")
    copied(samples / "two", old / "inner")
    copied(samples / "two", tmp_path / "iter_0000002")

    report = prune(age(tmp_path), keep_last=1)

    assert report.removed[0].stays == ("inner", "train_dataloader.pt")
    assert names_in(old) == ["inner", "train_dataloader.pt"]
    assert len(list((old / "inner").rglob("*"))) == len(list((samples / "two").rglob("*")))


def test_an_empty_directory_of_an_iteration_is_what_a_killed_save_left(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "other").mkdir()

    prune(age(tmp_path), unfinished=True)

    assert names_in(tmp_path) == ["other"]


def test_the_iteration_that_the_run_notes_stays(samples: Path, tmp_path: Path) -> None:
    for number in (100, 200, 300):
        age(copied(samples / "two", tmp_path / f"iter_{number:07d}"), OLD_S - number)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")

    prune(tmp_path, keep_last=1)

    assert names_in(tmp_path)[:2] == ["iter_0000100", "iter_0000300"]


def test_what_does_not_exist_or_cannot_be_meant_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        prune(tmp_path / "none", keep_last=1)
    with pytest.raises(PlanError, match="keep_last is 0"):
        prune(tmp_path, keep_last=0)


class KilledError(BaseException):
    """Stands for the end of the process."""


class _Killer:
    """Ends the process, so to speak, before the n-th change of a directory."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self, event: str, _: tuple[Any, ...]) -> None:
        if self.left is None or event not in {"os.remove", "os.rmdir", "os.rename"}:
            return
        if self.left == 0:
            raise KilledError
        self.left -= 1

    @contextmanager
    def before(self, number: int) -> Iterator[None]:
        self.left = number
        try:
            yield
        finally:
            self.left = None


KILLER = _Killer()
"""Hooks of this kind stay for good; it does nothing outside ``before``."""


@pytest.fixture(scope="module")
def killer() -> _Killer:
    sys.addaudithook(KILLER)
    return KILLER


@pytest.mark.parametrize("sample", ["one", "two"])
def test_a_prune_that_is_killed_leaves_nothing_that_looks_whole(
    sample: str, samples: Path, tmp_path: Path, killer: _Killer
) -> None:
    number, was_killed = 0, True
    while was_killed:
        root = tmp_path / str(number)
        for iteration in (1, 2):
            age(copied(samples / sample, root / f"iter_{iteration:07d}"), OLD_S - iteration)
        was_killed = False
        try:
            with killer.before(number):
                prune(root, keep_last=1)
        except KilledError:
            was_killed = True
        expected = Standing.COMPLETE if number == 0 else Standing.UNFINISHED
        if (root / "iter_0000001").exists():
            assert look_at(root, "iter_0000001", 0.0).standing is expected, number
        prune(root, keep_last=1, unfinished=True, older_than_s=0)
        assert names_in(root) == ["iter_0000002"], number
        number += 1
    assert number > 10
