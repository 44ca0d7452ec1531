"""Conversions that are killed, of damaged sources, or refused."""

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from safetensors import safe_open

import dist_ckpt_strategies
from dist_ckpt_strategies import ConvertOptions, Options, convert, diff, upgrade
from dist_ckpt_strategies.config import Verify
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CoverageError,
    IncompleteCheckpointError,
    PlanError,
    StorageError,
    StrategyError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.formats.locations import is_finished
from dist_ckpt_strategies.integrations import dcp
from dist_ckpt_strategies.storage.files import LOCK_NAME
from tests.cli.commands import json_of, run
from tests.support.checkpoints import contents, copied, flip_at
from tests.support.disks import tiny_tmpfs
from tests.support.ranks import RankDiedError, run_processes
from tests.support.sharding import on_grid, state_of
from tests.tools.all_formats import saved_by

pytestmark = pytest.mark.multiprocess

SMALL = ConvertOptions(max_memory_bytes=1, max_file_bytes=20_000, num_threads=2)
"""Many files."""


def state(rank: int, _to: str) -> dict[str, Any]:
    """8 arrays of 64 KiB and an object."""
    cuts = [on_grid(f"w{n}", (128, 128), (4, 2), size=1) for n in range(8)]
    value = {"t": torch.arange(9), "s": {1}}
    return state_of(rank, cuts) | {"object": ShardedObject("rng", value, (1,), (0,))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state in each format; not to be changed."""
    return saved_by(1, state, tmp_path_factory.mktemp("saved"))


def convert_and_die(_rank: int, source: Path, target: Path, to: str) -> None:
    def die(done: int, total: int) -> None:
        if done >= total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, target, to, options=SMALL, watch=die)


@pytest.mark.parametrize(
    "way",
    [
        "pack zarr@1",
        "zarr@1 torch_dist",
        "torch_dist zarr@3",
        "torch_dist safetensors",
        "zarr@1 pack",
    ],
)
def test_a_killed_conversion_leaves_nothing_visible_and_is_done_again(
    saved: Path, tmp_path: Path, way: str
) -> None:
    (source, to), target = way.split(), tmp_path / "t"
    died = run_processes(1, convert_and_die, saved / source, target, to)
    assert [type(result) for result in died] == [RankDiedError], died
    assert not (target / "model.safetensors.index.json").exists()
    assert {path.name.partition("-")[0] for path in target.iterdir()} <= {".partial", "packs"}
    with pytest.raises(IncompleteCheckpointError):
        diff(saved / source, target)

    report = convert(saved / source, target, to, options=SMALL)

    assert report.nbytes == 8 * (64 << 10)
    assert to == "safetensors" or diff(saved / source, target).is_equal
    assert not list(target.rglob(".partial-*"))


@pytest.mark.parametrize("to", ["pack", "zarr@1", "torch_dist", "safetensors"])
def test_a_full_disk_is_called_that(saved: Path, tmp_path: Path, to: str) -> None:
    with (
        tiny_tmpfs(tmp_path / "tiny") as disk,
        pytest.raises(StorageError, match=rf"{disk}/t.*: no space left; free some"),
    ):
        convert(saved / "zarr@3", disk / "t", to)


def test_a_key_that_no_file_can_have_goes_where_keys_are_no_files(tmp_path: Path) -> None:
    source, target, key = tmp_path / "pack", tmp_path / "t", "k" * 300
    dcp.save({key: torch.arange(4.0), "object": {1}}, source, no_dist=True)
    with pytest.raises(PlanError, match="kkk"):
        convert(source, target, "zarr@1")
    target.mkdir(exist_ok=True)
    (target / LOCK_NAME).touch()  # as a commit leaves it that has failed

    convert(source, target, "torch_dist")

    assert diff(source, target).is_equal


@pytest.mark.parametrize("source", ["zarr@1", "pack"])
def test_a_conversion_to_packs_that_fails_leaves_no_file(
    saved: Path, tmp_path: Path, source: str
) -> None:
    damaged = copied(saved / source, tmp_path / "c")
    name = "packs/*/*" if source == "pack" else "w7/0.0"
    path = max(damaged.glob(name), key=lambda path: path.stat().st_size)
    truncate_half(path)

    with pytest.raises(StorageError, match=str(path)):
        convert(damaged, tmp_path / "t", ("safetensors", 1), options=SMALL)
    assert contents(tmp_path / "t") == {}


def test_a_checkpoint_that_appears_in_the_target_meanwhile_is_kept(
    saved: Path, tmp_path: Path
) -> None:
    def save_there(done: int, _total: int) -> None:
        if done and not (tmp_path / "t" / "index").exists():
            convert(saved / "zarr@3", tmp_path / "t", "pack")

    with pytest.raises(StorageError, match=r"another (process|save)"):
        convert(saved / "zarr@1", tmp_path / "t", "pack", options=SMALL, watch=save_there)
    assert diff(saved / "zarr@1", tmp_path / "t").is_equal


def unlink(path: Path, _at: int) -> None:
    path.unlink()


def truncate_half(path: Path, _at: int = 0) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_middle(path: Path, _at: int) -> None:
    flip_at(path, path.stat().st_size // 2)


DAMAGES: list[tuple[str, Callable[[Path, int], None]]] = [
    ("zarr@3/w1/c/0/1", unlink),
    ("zarr@3/w1/c/0/1", os.truncate),
    ("zarr@3/common.pt", flip_at),
    ("zarr@1/w1/0.1", os.truncate),
    ("zarr@1/w1/0.1", unlink),
    ("zarr@1/rng/shard_0_1.pt", flip_at),
    ("torch_dist/__0_0.distcp", flip_at),
    ("torch_dist/__0_1.distcp", os.truncate),
    ("torch_dist/__0_0.distcp", unlink),
    ("torch_dist/.metadata", os.truncate),
    ("torch_dist/common.pt", flip_at),
    ("pack/packs/*/*.safetensors", flip_middle),
    ("pack/packs/*/*.safetensors", truncate_half),
    ("pack/packs/*/*.safetensors", unlink),
    ("pack/saves/*/index", flip_middle),
    ("pack/index", truncate_half),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damage_of_the_source_is_named_and_nothing_is_visible(
    saved: Path, tmp_path: Path, name: str, damage: Callable[[Path, int], None]
) -> None:
    source = name.partition("/")[0]
    copied(saved / source, tmp_path / source)
    (path,) = tmp_path.glob(name)
    damage(path, 70)  # in an archive: within its pickle

    to = "torch_dist" if source.startswith("zarr") else "zarr@1"
    with pytest.raises(CheckpointError) as found:
        convert(tmp_path / source, tmp_path / "target", to)
    assert str(path) in str(found.value)
    assert not is_finished(tmp_path / "target")


@pytest.mark.parametrize(("act", "by"), [(convert, "environment"), (upgrade, "options")])
def test_what_would_be_read_unverified_is_not_converted(
    act: Callable[..., Any], by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    optimizer = {"param_state_sharding_type": "fully_sharded_model_space"}
    dist_ckpt_strategies.save(state(0, "pack") | {"optimizer": optimizer}, source)
    flip_middle(max(source.glob("packs/*/*"), key=lambda path: path.stat().st_size), 0)
    options = ConvertOptions(options=Options(verify=Verify.OFF)) if by == "options" else None
    if by == "environment":
        monkeypatch.setenv("DIST_CKPT_VERIFY", "off")

    with pytest.raises(StorageError, match="is damaged"):
        act(source, tmp_path / "target", "zarr@1", options=options)
    assert not is_finished(tmp_path / "target")


def test_packs_of_what_was_read_unverified_say_so_for_good(saved: Path, tmp_path: Path) -> None:
    source = copied(saved / "pack", tmp_path / "source")
    flip_middle(max(source.glob("packs/*/*"), key=lambda path: path.stat().st_size), 0)
    unverified = ConvertOptions(options=Options(verify=Verify.OFF))
    convert(source, tmp_path / "rescued", "pack", options=unverified)

    (tmp_path / "rescued/index").unlink()
    assert run("rebuild-index", tmp_path / "rescued").exit_code == 0
    convert(tmp_path / "rescued", tmp_path / "again", "pack")
    convert(saved / "pack", tmp_path / "whole", "pack")

    (found,) = diff(saved / "pack", tmp_path / "again").arrays
    assert found.num_differing == 1
    for name in ("rescued", "again", "whole"):
        features = [] if name == "whole" else ["unverified"]
        for command in ("verify", "inspect"):
            assert json_of(command, tmp_path / name, code=0)["features"] == features
            assert ("unverified" in run(command, tmp_path / name).stdout) == bool(features)
        for path in (tmp_path / name).glob("packs/*/*"):
            with safe_open(path, "np") as file:
                assert file.metadata()["features"] == ",".join(features)


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("trapped",)


class Part:
    """Has a pickle get what is no member of an enum."""

    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "numel")


def test_a_description_that_would_run_something_or_leaves_out_a_shard_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    description = copied(saved / "torch_dist", tmp_path / "c") / ".metadata"
    found = pickle.loads(description.read_bytes())
    found.state_dict_metadata["w1"].chunks.pop()

    description.write_bytes(pickle.dumps(found))
    with pytest.raises(CoverageError, match="w1: main replicas cover"):
        convert(tmp_path / "c", tmp_path / "t", "pack")
    (gap,) = diff(tmp_path / "c", saved / "torch_dist").arrays
    assert (gap.key, gap.difference) == ("w1", "damaged")
    assert gap.a.startswith("w1: main replicas cover")
    for wanted, name in ((Trap(), "posix.mkdir"), (Part(), "builtins.getattr")):
        description.write_bytes(pickle.dumps(wanted))
        with pytest.raises(UnsafeObjectError, match=rf"\.metadata names {name},"):
            convert(tmp_path / "c", tmp_path / "t", "pack")
    assert not (tmp_path / "trapped").exists()


def test_wrong_arguments_are_refused(saved: Path, tmp_path: Path) -> None:
    for to in ("zarr@2", ("zarr", 2)):
        with pytest.raises(PlanError, match="expected one of pack, zarr@1, zarr@3, torch_dist, sa"):
            convert(saved / "zarr@1", tmp_path / "t", to)
    for to, kind in (("safetensors", "array of a model"), ("pack", "array or object")):
        with pytest.raises(ArrayNotFoundError, match=f"{kind} whose key matches 'nothing'"):
            convert(saved / "zarr@1", tmp_path / "t", to, keys="nothing")
    with pytest.raises(ArrayNotFoundError, match=r"no array's key matches 'decodr\.\*'"):
        diff(saved / "zarr@1", saved / "pack", keys="decodr.*")
    with pytest.raises(StrategyError, match=r"nothing to upgrade.*found none"):
        upgrade(saved / "zarr@1", tmp_path / "t")


class Custom:
    def __init__(self) -> None:
        self.n = 1


def test_objects_of_classes_that_are_not_allowed_are_named(saved: Path, tmp_path: Path) -> None:
    root = copied(saved / "zarr@1", tmp_path / "c")
    torch.save(Custom(), root / "rng" / "shard_0_1.pt")

    convert(root, tmp_path / "a", "pack")  # the bytes stay as they are
    with pytest.raises(UnsafeObjectError, match="Custom"):
        convert(root, tmp_path / "b", "torch_dist")
    convert(root, tmp_path / "b", "torch_dist", allow=[Custom])
    assert diff(root, tmp_path / "b", allow=[Custom]).is_equal
