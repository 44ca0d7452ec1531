"""An index that is lost or damaged is made anew from the packs; nothing is lost by that."""

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import DType, Region, ShardId, ShardSpec
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StrategyError,
)
from dist_ckpt_strategies.formats.pack import PackLimits, lay_out
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.formats.pack_write import write_pack
from dist_ckpt_strategies.formats.rebuild import rebuild_index
from dist_ckpt_strategies.sharded.save import Contents
from dist_ckpt_strategies.storage.files import LOCK_NAME, Directory
from dist_ckpt_strategies.strategies.own_load import OwnLoadShardedStrategy
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy
from tests.cli.commands import json_of, run
from tests.support.checkpoints import flip_at
from tests.support.layouts import scattered
from tests.support.packs import save_packs
from tests.support.pages import reader_of
from tests.support.sharding import part_of, state_of
from tests.support.system_calls import before_calls
from tests.support.tensors import bits

CUTS = scattered()


def contents(rank: int, common: object = 1) -> Contents:
    state = state_of(rank, CUTS) | {"o": ShardedObject("o", rank, (4,), (rank,))}
    content = pickle.dumps(common) if rank == 0 else None
    return PackSaveShardedStrategy().contents(state, content, copies_common=True)


def save(root: Path, common: object = 1) -> None:
    save_packs(root, 4, lambda rank: contents(rank, common), limits=PackLimits(1000))


def files(root: Path, *, but: str = "index") -> dict[str, bytes]:
    """All files but those that a rebuilt index replaces."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name not in {but, ".dist-ckpt-commit"}
    }


def require_content(root: Path, common: object = 1) -> None:
    arrays, objects, found = reader_of("packs.md", "read_checkpoint")["read_checkpoint"](root)
    assert arrays.keys() == {cut.key for cut in CUTS}
    for cut in CUTS:
        for part in cut.parts:
            assert arrays[cut.key][part.slices()].tobytes() == bits(part_of(cut, part)), cut.key
    assert len(objects) == 4
    assert pickle.loads(found) == common


def lose_index(root: Path) -> None:
    (root / "index").unlink()


def empty_index(root: Path) -> None:
    (root / "index").write_bytes(b"")


def flip_save_id(root: Path) -> None:
    flip_at(root / "index", (root / "index").read_bytes().index(b"save_id") + 14)


def cut_index(root: Path) -> None:
    (root / "index").write_bytes((root / "index").read_bytes()[:-20])


def leave_the_directory(root: Path) -> None:
    (full,) = root.glob("saves/*/index")
    content = (root / "index").read_bytes()
    (root / "index").write_bytes(content.replace(full.parent.name.encode(), b"../../elsewhere"))


def set_infinite_size(root: Path) -> None:
    text = (root / "index").read_text()
    (root / "index").write_text(re.sub(r'"nbytes": \d+', '"nbytes": 1e999', text))


def set_absurd_offset(root: Path) -> None:
    text = (root / "index").read_text()
    (root / "index").write_text(re.sub(r'"byte_offset": ', f"\\g<0>{1 << 70}", text))


def lose_full_index(root: Path) -> None:
    shutil.rmtree(root / "saves")


def flip_full_index(root: Path) -> None:
    (path,) = root.glob("saves/*/index")
    flip_at(path, 20)


def flip_root(root: Path) -> None:
    (path,) = root.glob("saves/*/index")
    flip_at(path, -20)


def flip_size_of_root(root: Path) -> None:
    (path,) = root.glob("saves/*/index")
    flip_at(path, -3)


def lose_all_but_packs(root: Path) -> None:
    lose_full_index(root)
    for name in ("index", "common.pt", "metadata.json"):
        (root / name).unlink()


DAMAGES = [lose_index, empty_index, cut_index, flip_save_id, lose_full_index, flip_full_index]
DAMAGES += [leave_the_directory, flip_root, lose_all_but_packs]
DAMAGES += [set_infinite_size, set_absurd_offset, flip_size_of_root]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.slow
def test_a_lost_or_damaged_index_says_the_remedy_which_works(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path)
    (tmp_path / "packs" / "notes.txt").write_bytes(b"mine")
    whole = files(tmp_path)
    damage(tmp_path)
    with pytest.raises((CorruptCheckpointError, IncompleteCheckpointError), match="rebuild-index"):
        read_all(tmp_path)

    rebuilt = rebuild_index(tmp_path)

    assert rebuilt is not None
    assert (rebuilt.num_arrays, rebuilt.num_objects) == (len(CUTS), 4)
    assert rebuilt.passed_over == ()
    require_content(tmp_path)
    assert files(tmp_path) == whole
    assert rebuild_index(tmp_path) is None


def read_all(root: Path) -> None:
    checkpoint = PackCheckpoint(root, Options())
    checkpoint.find(checkpoint.keys())


def test_an_index_that_is_whole_is_replaced_by_force_alone(tmp_path: Path) -> None:
    save(tmp_path)
    before = (tmp_path / "index").read_bytes()
    assert rebuild_index(tmp_path) is None
    assert (tmp_path / "index").read_bytes() == before

    assert rebuild_index(tmp_path, force=True) is not None
    assert (tmp_path / "index").read_bytes() != before
    require_content(tmp_path)
    save(tmp_path, common=2)
    require_content(tmp_path, 2)


def two_saves(root: Path) -> tuple[dict[str, bytes], set[str]]:
    """A directory with the packs of two saves, all whole, and the names of the newer ones."""
    save(root, "old")
    old = files(root, but="")
    save(root, "new")
    new = {name for name in files(root) if name.startswith("packs/")}
    for name, content in old.items():
        if name.startswith("packs/"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_bytes(content)
    (root / "index").unlink()
    return old, new


def test_the_newest_save_that_is_whole_counts(tmp_path: Path) -> None:
    _, new = two_saves(tmp_path)
    rebuild_index(tmp_path)
    require_content(tmp_path, "new")

    (tmp_path / min(new)).unlink()
    rebuilt = rebuild_index(tmp_path)
    assert rebuilt is not None
    (why,) = rebuilt.passed_over
    assert f"{len(new) - 1} of its {len(new)} packs are whole" in why
    require_content(tmp_path, "old")


@pytest.mark.parametrize("place", ["header", "table", "end"])
def test_a_save_with_a_damaged_pack_is_passed_over(place: str, tmp_path: Path) -> None:
    _, new = two_saves(tmp_path)
    path = tmp_path / min(new)
    if place == "end":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip_at(path, 100 if place == "header" else -40)
    rebuilt = rebuild_index(tmp_path)

    assert rebuilt is not None
    assert any(path.name in why for why in rebuilt.passed_over)
    require_content(tmp_path, "old")


def test_where_no_save_is_whole_it_is_said_what_is_missing(tmp_path: Path) -> None:
    save(tmp_path)
    lose_index(tmp_path)
    (name, *_) = tmp_path.glob("packs/*/*")
    name.unlink()
    before = files(tmp_path, but="")
    with pytest.raises(
        IncompleteCheckpointError, match="packs are whole, those of ranks 0, 1, 2, 3"
    ):
        rebuild_index(tmp_path)
    assert files(tmp_path, but="") == before
    assert not (tmp_path / "index").exists()

    shutil.rmtree(tmp_path / "packs")
    with pytest.raises(IncompleteCheckpointError, match="holds no packs"):
        rebuild_index(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        rebuild_index(tmp_path / "nothing")


def write_alone(root: Path, rows: slice) -> None:
    """A pack of a writer that shares no id with others, as torch.distributed.checkpoint's do."""
    region = Region((rows.start, 0), (rows.stop - rows.start, 3))
    shard = ShardSpec(ShardId("w", region), (4, 3), DType.FLOAT32)
    (pack,) = lay_out([shard]).packs
    content = torch.arange(12.0).reshape(4, 3)[rows].reshape(-1).view(torch.uint8).numpy()
    name = f"{rows.start:016x}"
    write_pack(Directory(root), name, pack, [[content]], save_id="", rank=rows.start)


def test_packs_without_a_save_id_are_one_group(tmp_path: Path) -> None:
    write_alone(tmp_path, slice(0, 1))
    with pytest.raises(IncompleteCheckpointError, match=r"without an id: w: .* 3 of 12 elements"):
        rebuild_index(tmp_path)
    write_alone(tmp_path, slice(1, 4))
    assert rebuild_index(tmp_path) is not None
    arrays, objects, common = reader_of("packs.md", "read_checkpoint")["read_checkpoint"](tmp_path)
    assert arrays["w"].tolist() == torch.arange(12.0).reshape(4, 3).tolist()
    assert (objects, common) == ({}, None)
    assert not (tmp_path / "metadata.json").exists()


def test_a_checkpoint_of_another_format_is_left_alone(tmp_path: Path) -> None:
    write_alone(tmp_path, slice(0, 4))
    marker = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    (tmp_path / "metadata.json").write_text(marker)
    with pytest.raises(StrategyError, match="torch_dist"):
        rebuild_index(tmp_path, force=True)


def test_a_save_of_which_the_index_was_made_before_its_commit_keeps_its_packs(
    tmp_path: Path,
) -> None:
    def rebuild(started: Any) -> None:
        if started.comm.rank == 0:
            started.comm.all_gather(None)
            rebuild_index(tmp_path)
        else:
            started.comm.all_gather(None)
        started.comm.all_gather(None)

    save_packs(tmp_path, 4, contents, before_commit=rebuild)
    require_content(tmp_path)


def state() -> dict[str, Any]:
    weight = ShardedTensor.from_rank_offsets("w", torch.arange(12.0))
    return {"w": weight, "o": ShardedObject("o", {"x": 1}, (1,), (0,)), "iteration": 7}


def test_a_save_that_comes_before_the_copies_are_mended_keeps_its_own(tmp_path: Path) -> None:
    dist_ckpt_strategies.save(state(), tmp_path)
    (tmp_path / "common.pt").unlink()
    later = state() | {"iteration": 8}

    def save_first(_name: str, path: str) -> None:
        if path.endswith(LOCK_NAME) and not is_over:
            is_over.append(True)
            dist_ckpt_strategies.save(later, tmp_path, overwrite=True)

    is_over: list[bool] = []
    with before_calls(save_first, ["open"]), pytest.raises(CheckpointChangedError):
        rebuild_index(tmp_path)
    assert torch.load(tmp_path / "common.pt")["iteration"] == 8


def test_the_command_and_the_loads_around_it(tmp_path: Path) -> None:
    root = tmp_path / "iter"
    dist_ckpt_strategies.save(state(), root, ("safetensors", 1))
    assert run("rebuild-index", root).exit_code == 0
    lose_index(root)
    for strategy in (None, OwnLoadShardedStrategy()):
        with pytest.raises(CheckpointError, match="rebuild-index"):
            dist_ckpt_strategies.load(state(), root, strategy)

    found = json_of("rebuild-index", root, code=0)
    assert (found["rebuilt"], found["num_packs"], found["passed_over"]) == (True, 1, [])
    loaded: Any = dist_ckpt_strategies.load(state(), root)
    assert (loaded["iteration"], loaded["o"]) == (7, {"x": 1})
    for file, content in (("metadata.json", b"{"), ("common.pt", None)):
        (root / file).write_bytes(content) if content else (root / file).unlink()
        assert run("verify", root).exit_code == 1
        assert json_of("rebuild-index", root, code=0)["rebuilt"] is False
        assert run("verify", root).exit_code == 0
    assert "made the index of save" in run("rebuild-index", root, "--force").stdout

    (pack,) = root.glob("packs/*/*")
    flip_at(pack, 50)
    result = run("rebuild-index", root, "--force")
    assert (result.exit_code, pack.name in result.stderr) == (1, True)
    assert run("rebuild-index", tmp_path / "nothing").exit_code == 3
    assert run("rebuild-index", tmp_path).exit_code == 1
