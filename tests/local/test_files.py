"""Files of local checkpoints on one node: whole and durable, refused, or never seen."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.support.system_calls import before_calls

OLD, NEW = 1, 2


def manager_of(root: Path) -> LocalCheckpointManager:
    return LocalCheckpointManager(root, keep=2)


def save(root: Path, iteration: int) -> Path:
    """The file of a save whose values tell its iteration."""
    values = {"w": torch.full((5,), float(iteration)), "b": torch.ones(2, dtype=torch.bfloat16)}
    manager_of(root).save(BasicTensorAwareStateDict(values), iteration)
    (found,) = root.glob(f"0/iter_{iteration:07d}_*")
    return found


def loaded(root: Path) -> int:
    """The iteration that is loaded, whole."""
    state, name = manager_of(root).load()
    (value,) = set(state.state_dict["w"].tolist())
    assert state.state_dict["b"].tolist() == [1, 1]
    assert name == (value, 0, "")
    return int(value)


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """The newer of two saves."""
    save(tmp_path, OLD)
    return save(tmp_path, NEW)


def test_a_file_of_another_length_is_refused(newest: Path) -> None:
    root, content = newest.parents[1], newest.read_bytes()
    assert (loaded(root), newest.stat().st_nlink) == (NEW, 1)
    others = [b"", content[:32], content[:-1], content + b"\0", 2 * content, b"\0" + content]
    for other in others:
        newest.write_bytes(other)
        assert loaded(root) == OLD


def test_a_file_is_a_pack_with_every_tensor_under_its_place(newest: Path) -> None:
    found = safetensors.torch.load_file(newest)

    assert found.keys() - {"__padding__"} == {"w@0", "b@0", "state#0", "__digests__"}
    assert found["w@0"].tolist() == [NEW] * 5
    assert found["b@0"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "replace",
    [
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.with_name("x").rename(path.with_name(path.stem + "1.safetensors")),
    ],
    ids=["directory", "pipe", "device", "loop", "dangling", "other"],
)
def test_other_files_are_refused_without_waiting(
    replace: Callable[[Path], object], newest: Path
) -> None:
    newest.rename(newest.with_name("x"))
    replace(newest)

    assert loaded(newest.parents[1]) == OLD


def test_a_file_that_is_cut_while_it_is_read_is_refused(newest: Path) -> None:
    with before_calls(lambda _name, _path: os.truncate(newest, 8), ["preadv"]):
        assert loaded(newest.parents[1]) == OLD


def test_only_names_of_shards_below_names_of_ranks_are_found(newest: Path) -> None:
    root, content = newest.parents[1], newest.read_bytes()
    later = newest.name.replace("iter_0000002", "iter_0000009")
    for name in ("01", "-1", "x", "1.5", "٣", "12/3"):
        (root / name).mkdir(parents=True)
        (root / name / later).write_bytes(content)
    (root / "7").write_bytes(content)
    (root / later).write_bytes(content)
    for name in (".partial-0", later + ".part", later[:-12], "iter_9_0_local_a1.safetensors"):
        newest.with_name(name).write_bytes(content)

    assert manager_of(root).find_latest() == NEW
    assert loaded(root) == NEW


# Writing


def failing(number: int) -> Callable[..., Any]:
    """A call of the system that fails with this error."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_a_shard_that_cannot_be_finished_does_not_appear(call: str, tmp_path: Path) -> None:
    with (
        before_calls(failing(errno.ENOSPC), [call]),
        pytest.raises(StorageError, match="no space left"),
    ):
        save(tmp_path, NEW)

    assert files_below(tmp_path) == []


def test_files_of_a_killed_save_are_removed_and_those_of_a_running_one_are_not(
    newest: Path,
) -> None:
    root, begun = newest.parents[1], list[str]()
    newest.with_name(".partial-0").write_bytes(b"left")

    def save_beside(_call: str, path: str) -> None:
        if not begun:
            begun.append(path)
            save(root, NEW + 1)
            assert len(files_below(root)) == 4

    with before_calls(save_beside, ["fsync"]):
        save(root, NEW + 2)

    assert loaded(root) == NEW + 2
    assert len(files_below(root)) == 3


def test_a_file_that_is_taken_for_a_leftover_before_it_is_locked_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, taken = fcntl.flock, list[Path]()

    def take_first(handle: int, how: int) -> None:
        if not taken and (begun := [*(tmp_path / "0").iterdir()]):  # the directory is locked before
            taken.extend(begun)
            taken[0].unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", take_first)
    save(tmp_path, NEW)

    assert (len(taken), loaded(tmp_path)) == (1, NEW)


def test_a_file_system_without_locks_will_do(newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    newest.with_name(".partial-0").write_bytes(b"left")
    save(newest.parents[1], NEW + 1)

    assert len(files_below(newest.parents[1])) == 3


def test_the_name_of_every_new_directory_is_flushed(tmp_path: Path) -> None:
    flushed: set[str] = set()
    with before_calls(lambda _name, path: flushed.add(path), ["fsync"]):
        path = save(tmp_path / "a" / "b" / "root", NEW)

    names = {str(place) for place in path.parents if place.is_relative_to(tmp_path)}
    assert names <= flushed
    assert any(Path(place).parent == path.parent for place in flushed)
