"""A checkpoint is visible whole, or not at all, and clearing one touches nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CheckpointExistsError, IncompleteCheckpointError
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy
from tests.support.checkpoints import contents, write_array, write_marker, write_object

VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)


def make_checkpoint(root: Path) -> None:
    """Arrays, nested ones among them, objects, common state, and the marker."""
    root.mkdir(parents=True, exist_ok=True)
    for key in ("w", "optimizer/exp_avg.w", "w/below"):
        write_array(root, VALUES, key=key)
    write_object(root / "rng_state" / "shard_0.0_1.2.pt", {"seed": 1})
    write_object(root / "a" / "b" / "state" / "shard_0_1.pt", None)
    write_object(root / "common.pt", {"iteration": 7})
    write_marker(root, "zarr")


OBJECTS = {"rng_state", "a/b/state"}
KEYS = {"w", "optimizer/exp_avg.w", "w/below"} | OBJECTS


def save_over(root: Path, *keys: str) -> None:
    """Save arrays and objects of these keys as a strategy does for Megatron-Core's own save."""
    state: dict[str, Any] = {
        key: ShardedObject(key, 5, (1,), (0,))
        if key in OBJECTS
        else ShardedTensor.from_rank_offsets(key, torch.zeros(4))
        for key in keys
    }
    ZarrSaveShardedStrategy().save(state, root)


# Visible or not


ODD = [
    {"sharded_backend": None},
    {"sharded_backend": "zarr", "sharded_backend_version": "1"},
    {"sharded_backend": "zarr", "sharded_backend_version": True},
    {"sharded_backend": "zarr", "extra": 1},
    {"common_backend": "torch"},
]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff\xfe", b"null", b"{}", b"[" * 100_000, b'{"sharded_backend": "zarr"}{'),
        *(json.dumps(fields).encode() for fields in ODD),
    ],
)
def test_a_marker_that_does_not_parse_means_incomplete(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_bytes(content)

    with pytest.raises(IncompleteCheckpointError, match=r"metadata.json is not whole") as caught:
        dist_ckpt_strategies.load({}, tmp_path)
    assert caught.value.path == str(tmp_path / "metadata.json")


# Clearing for overwrite


@pytest.mark.parametrize("missing", sorted(KEYS))
def test_without_a_marker_what_would_not_be_replaced_is_refused_and_stays(
    missing: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "metadata.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(CheckpointExistsError, match=rf"1 arrays or objects .*: {missing};"):
        save_over(tmp_path, *KEYS.difference({missing}))

    assert contents(tmp_path) == before


@pytest.mark.parametrize("key", ["inner", "inner/w", "linked/w", "a/inner/x"])
def test_a_key_that_leads_into_something_else_is_refused(key: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for inner in (root / "inner", root / "a" / "inner", tmp_path / "elsewhere"):
        make_checkpoint(inner)
    make_checkpoint(root)
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "metadata.json").rename(root / ".removed-metadata.json")
    before = contents(tmp_path)

    with pytest.raises(CheckpointExistsError, match=f": {key}: .* would become a part") as caught:
        save_over(root, "w", key)
    assert caught.value.key == key
    assert contents(tmp_path) == before
    save_over(root, "w", "innermost")


def test_a_commit_puts_nothing_where_a_link_in_place_of_a_directory_leads(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    dist_ckpt_strategies.save({"iteration": 3}, root, ("zarr", 1))
    tensor = ShardedTensor.from_rank_offsets("model/w", torch.ones(4))
    request = dist_ckpt_strategies.save_async({"w": tensor}, root, ("zarr", 1), overwrite=True)
    (root / "model").symlink_to(elsewhere)  # since the save has begun

    with pytest.raises(CheckpointExistsError, match="model is a link"):
        request.wait(60)
    assert list(elsewhere.iterdir()) == []
    assert dist_ckpt_strategies.load({}, root) == {"iteration": 3}  # it is not replaced


def test_checkpoints_and_files_that_are_no_part_of_it_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for place in (root, root / "iter_0000010", root / "runs" / "b", tmp_path / "other"):
        make_checkpoint(place)
    (root / "iter_0000010" / "metadata.json").unlink()
    (tmp_path / "other" / "metadata.json").unlink()  # looks like a directory of arrays
    (root / "previous").symlink_to(tmp_path / "other")
    (root / "linked_array").symlink_to(tmp_path / "other" / "w")
    names = ("README.txt", "w.py", "logs/run/0.0", "tokenizer/vocab.json", "notes.pt")
    extra = dict.fromkeys((*names, "latest_checkpointed_iteration.txt"), b"mine")
    for name, content in extra.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    kept = [root / "iter_0000010", root / "runs" / "b", tmp_path / "other"]
    before = [contents(place) for place in kept]
    save_over(root, "x", "linked_array")  # only the link is replaced

    assert [contents(place) for place in kept] == before
    assert not (root / "linked_array").is_symlink()
    found = contents(root)
    assert {name: found[name] for name in extra} == extra
    assert not (root / "w").exists()


def test_files_of_torch_dist_are_replaced_with_their_marker_only(tmp_path: Path) -> None:
    theirs, ours = {".metadata", "__0_0.distcp", "__12_3.distcp"}, {"w/.zarray", "w/0"}
    for name in (*theirs, "mine.distcp"):
        (tmp_path / name).write_bytes(b"x")
    save_over(tmp_path, "w")
    assert contents(tmp_path).keys() == theirs | ours | {"mine.distcp"}

    write_marker(tmp_path, "torch_dist")
    save_over(tmp_path, "w")
    assert contents(tmp_path).keys() == ours | {"mine.distcp"}
