"""A checkpoint of the format ("zarr", 2), which earlier releases wrote, is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import IncompatibleVersionError
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy
from dist_ckpt_strategies.tools.convert import convert
from tests.cli.commands import run
from tests.support.checkpoints import contents, write_object


def write(root: Path, backend: str | None, version: int = 2) -> Path:
    """Names that such a checkpoint has; the marker names a backend, or is lost."""
    (root / "manifest").mkdir(parents=True)
    (root / "manifest" / "index.json").write_text("{}")
    write_object(root / "common.pt", {"iteration": 7})
    if backend is not None:
        marker = {"sharded_backend": backend, "sharded_backend_version": version}
        (root / "metadata.json").write_text(json.dumps(marker))
    return root


def wanted() -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}


WAYS: dict[str, Callable[[Path], object]] = {
    "load": lambda root: dist_ckpt_strategies.load(wanted(), root),
    "open": dist_ckpt_strategies.open,
    "convert": lambda root: convert(root, root.with_name("new"), "pack"),
    "diff": lambda root: dist_ckpt_strategies.diff(root, root),
    "strategy": lambda root: ZarrLoadShardedStrategy().load(wanted(), root),
    "metadata": lambda root: ZarrLoadShardedStrategy().load_tensors_metadata(root),
}


@pytest.mark.parametrize(
    ("backend", "version"), [("zarr", 2), ("torch_dist", 1), (None, 0)], ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_refused_with_a_text_that_says_what_reads_it(
    way: str, backend: str | None, version: int, tmp_path: Path
) -> None:
    root = write(tmp_path / "c", backend, version)
    before = contents(root)

    with pytest.raises(IncompatibleVersionError, match=r"\('zarr', 2\).* commit \w+ .* convert"):
        WAYS[way](root)
    assert contents(root) == before


def test_megatrons_own_load_says_it_too(tmp_path: Path) -> None:
    dist_ckpt_strategies.register()
    with pytest.raises(Exception, match=r"\('zarr', 2\), which this release does not read"):
        dist_checkpointing.load(wanted(), str(write(tmp_path / "c", "zarr")))


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_commands_print_the_text_and_no_traceback(command: str, tmp_path: Path) -> None:
    result = run(command, write(tmp_path / "c", "zarr"))

    assert result.exit_code == 3
    assert "which this release does not read" in result.stderr
    assert "Traceback" not in result.output


def test_it_is_replaced_only_if_that_is_asked_for(tmp_path: Path) -> None:
    root = write(tmp_path / "c", "zarr")
    with pytest.raises(FileExistsError):
        dist_ckpt_strategies.save({"iteration": 3}, root)
    dist_ckpt_strategies.save({"iteration": 3}, root, overwrite=True)

    assert dist_ckpt_strategies.load({}, root) == {"iteration": 3}


def test_a_folder_of_that_name_in_another_checkpoint_is_no_obstacle(tmp_path: Path) -> None:
    dist_ckpt_strategies.save({"iteration": 3}, tmp_path / "c", ("zarr", 1))
    (tmp_path / "c" / "manifest").mkdir()
    (tmp_path / "c" / "manifest" / "index.json").write_text("{}")

    assert dist_ckpt_strategies.load({}, tmp_path / "c") == {"iteration": 3}
