"""Saves of the trained part of a model, over a base that has the rest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dist_ckpt_strategies
from dist_ckpt_strategies import Options, convert, save, save_async
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.integrations import dcp
from tests.cli.commands import json_of, run
from tests.support.entries import prepare
from tests.support.ranks import run_processes

NUM_ROWS = 12


def lora(seed: int, *, with_base: bool = True) -> dict[str, Any]:
    """A linear layer with its adapter and the adapter's moments, cut along the first axis."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    random_bits = torch.Generator().manual_seed(seed)

    def cut(key: str, columns: int) -> ShardedTensor:
        whole = torch.randn(NUM_ROWS, columns, generator=random_bits)
        return ShardedTensor.from_rank_offsets(
            key, whole.chunk(size)[rank].clone(), (0, rank, size)
        )

    base = {"linear.weight": cut("linear.weight", 5), "linear.bias": cut("linear.bias", 1)}
    names = ("linear.lora_a", "linear.lora_b", "optimizer.exp_avg.linear.lora_a")
    adapter = {key: cut(key, 2) for key in names}
    objects = {"extra": ShardedObject("linear._extra_state", {"seed": seed}, (size,), (rank,))}
    return (base | objects if with_base else {}) | adapter | {"iteration": seed}


def values(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.data.clone() for k, v in state.items() if isinstance(v, ShardedTensor)}


def _saved(rank: int, root: Path) -> None:
    prepare(60)
    save(lora(1), root / "base")
    save(lora(2), root / "sync", base=root / "base", only="*lora_*")
    save_async(lora(2), root / "async", base=root / "base", only=lambda k: "lora" in k).wait()
    save(lora(2, with_base=False), root / "alone", base=str(root / "base"))
    state = {k: v.data for k, v in lora(2).items() if isinstance(v, ShardedTensor)}
    if rank == 0:
        base = {k: v.data for k, v in lora(1).items() if isinstance(v, ShardedTensor)}
        dcp.save(base, root / "dcp_base", no_dist=True)
        moved = Options(base=str(root / "dcp_base"), only="*lora_*", timeout_s=60)
        dcp.save(state, root / "dcp", no_dist=True, options=moved)
        filled = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        dcp.load(filled, root / "dcp", no_dist=True)
        for key, tensor in filled.items():
            assert tensor.equal((state if "lora" in key else base)[key])


def _loaded(rank: int, root: Path) -> None:
    prepare(60)
    del rank
    expected = values(lora(1)) | values(lora(2, with_base=False))
    for name in ("sync", "async", "alone"):
        state = lora(9)
        del state["extra"]  # another number of ranks has saved it
        loaded: Any = dist_ckpt_strategies.load(state, root / name)
        assert loaded["iteration"] == 2
        for key, tensor in expected.items():
            assert loaded[key].equal(tensor), key


@pytest.mark.multiprocess
def test_the_trained_part_is_saved_and_all_is_loaded_at_another_layout(tmp_path: Path) -> None:
    assert run_processes(2, _saved, tmp_path, timeout_s=300) == [None] * 2
    assert run_processes(3, _loaded, tmp_path, timeout_s=300) == [None] * 3
    for name in ("sync", "async", "alone"):
        fields = json_of("inspect", tmp_path / name, code=0)
        assert [array["key"] for array in fields["arrays"]] == [
            "linear.lora_a",
            "linear.lora_b",
            "optimizer.exp_avg.linear.lora_a",
        ]
        assert fields["base"]["path"] == str(tmp_path / "base")
        assert str(tmp_path / "base") in run("inspect", tmp_path / name).stdout
        assert json_of("verify", tmp_path / name, code=0)["whole"]
    opened = dist_ckpt_strategies.open(tmp_path / "sync")
    base = dist_ckpt_strategies.open(tmp_path / "base")
    assert [*opened] == [*base]
    assert [*opened.objects] == [*base.objects]
    assert opened["linear.weight"][...].tolist() == base["linear.weight"][...].tolist()
    convert(tmp_path / "sync", tmp_path / "merged", "zarr@1")
    assert dist_ckpt_strategies.diff(tmp_path / "sync", tmp_path / "merged").is_equal


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter saved over a base beside it, in this process alone."""
    save(lora(1), tmp_path / "base")
    save(lora(2), tmp_path / "adapter", base=tmp_path / "base", only="*lora_*")
    return tmp_path / "adapter"


def test_another_base_is_refused_by_place_and_digest(adapter: Path) -> None:
    base = adapter.with_name("base")
    digest = dist_ckpt_strategies.open(base).identity
    save(lora(1), base, overwrite=True)
    other = dist_ckpt_strategies.open(base).identity
    with pytest.raises(PlanError, match=rf"{base} of digest {digest}; {base} has digest {other}"):
        dist_ckpt_strategies.load(lora(9), adapter)
    with pytest.raises(PlanError, match="another checkpoint"):
        dcp.load({"linear.weight": torch.zeros(NUM_ROWS, 5)}, adapter, no_dist=True)
    with pytest.raises(PlanError, match="another checkpoint"):
        dist_ckpt_strategies.open(adapter)


def test_a_base_may_move_and_is_missed_by_name(adapter: Path) -> None:
    base, moved = adapter.with_name("base"), adapter.with_name("moved")
    shutil.move(base, moved)
    with pytest.raises(IncompleteCheckpointError, match=rf"in its base {base}.*say where it is"):
        dist_ckpt_strategies.load(lora(9), adapter)
    loaded: Any = dist_ckpt_strategies.load(lora(9), adapter, base=moved)
    assert loaded["linear.weight"].equal(values(lora(1))["linear.weight"])
    opened = dist_ckpt_strategies.open(adapter, options=Options(base=str(moved)))
    assert opened["linear.bias"].shape == (NUM_ROWS, 1)
    assert json_of("verify", adapter, code=0)["whole"]


def test_a_base_that_cannot_be_named_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save(lora(1), tmp_path / "packs")
    convert(tmp_path / "packs", tmp_path / "zarr", "zarr@1")
    with pytest.raises(PlanError, match=r"expected a finished checkpoint of format \('safetensors"):
        save(lora(2), tmp_path / "c", base=tmp_path / "zarr")
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        save(lora(2), tmp_path / "c", base=tmp_path / "nowhere")
    with pytest.raises(PlanError, match=r"base: expected format \('safetensors', 1\)"):
        save(lora(2), tmp_path / "c", ("zarr", 1), base=tmp_path / "packs")
    with pytest.raises(StrategyError, match="base, only"):
        save(lora(2), tmp_path / "c", ("torch_dist", 1), only="*lora_*")
    assert not [*tmp_path.glob("c/*")]


def test_a_save_does_not_replace_what_its_base_needs(adapter: Path) -> None:
    """Neither the base nor the base of that, by whichever name; all stay as they were."""
    base, link = adapter.with_name("base"), adapter.with_name("link")
    link.symlink_to(base)
    for place, over in ((base, base), (link, base), (base, adapter), (adapter, adapter)):
        with pytest.raises(PlanError, match=rf"{place}: the save would replace .* {over}"):
            save(lora(3), place, base=over, only="*lora_*", overwrite=True)
        with pytest.raises(PlanError, match=rf"{place}: the save would replace .* {over}"):
            dcp.save(
                {"w": torch.ones(2)}, place, no_dist=True, options=Options(base=os.fspath(over))
            )
    dist_ckpt_strategies.load(lora(9), adapter)


def test_a_state_of_dcp_is_as_nested_as_it_was_in_the_base(tmp_path: Path) -> None:
    dcp.save({"model": {"layers": [torch.ones(2)]}}, tmp_path / "base", no_dist=True)
    options = Options(base=os.fspath(tmp_path / "base"))
    dcp.save({"lora": {"a": torch.zeros(2)}}, tmp_path / "new", no_dist=True, options=options)
    reader = dcp.PackStorageReader(tmp_path / "new")
    with pytest.warns(UserWarning, match="in a single process"):
        loaded = _load_state_dict_from_keys(storage_reader=reader)
    assert loaded["model"]["layers"][0].tolist() == [1.0, 1.0]
    assert loaded["lora"]["a"].tolist() == [0.0, 0.0]


def test_without_a_base_what_was_left_out_is_missed(tmp_path: Path) -> None:
    save(lora(2), tmp_path / "c", only="*lora_*")
    with pytest.raises(ArrayNotFoundError, match=r"linear\.(bias|weight)"):
        dist_ckpt_strategies.load(lora(9), tmp_path / "c")
