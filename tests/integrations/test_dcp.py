"""torch.distributed.checkpoint over packs, with FSDP2 and other states on real ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed import checkpoint
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    CoverageError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    StrategyError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.integrations.dcp import PackStorageReader, PackStorageWriter, load, save
from tests.cli.commands import run
from tests.support.checkpoints import flip_at, header_of
from tests.support.processes import finished
from tests.support.ranks import RankDiedError, allow_processes, done_by, run_processes
from tests.tools.all_formats import saved_by

dcp: Any = checkpoint

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
]


def bytes_of(tensor: torch.Tensor) -> bytes:
    elements: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return cast("bytes", elements.tobytes())


def whole(value: Any) -> Any:
    """The same without sharding, as what compares equal only where every bit does."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bytes_of(value)
    return value


def damage(root: Path) -> Path:
    """Flip a bit of the first block of a pack."""
    pack = min(root.glob("packs/*/*"))
    flip_at(pack, header_of(pack)[1])
    return pack


# FSDP2


class Training:
    """A model that FSDP2 has sharded, unevenly, and its optimizer; gradients are of the step."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.step, self.seed = 0, seed
        layers = torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3)
        self.model = torch.nn.Sequential(*layers)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 / (seed + 1))

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter) / self.step
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        extra = {
            "scale": torch.arange(5).bfloat16() * self.seed,
            "note": f"seed {self.seed}",
            "step": self.step,
        }
        return {"model": weights, "optimizer": moments, "extra": extra}

    def resume(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["extra"]["step"]


def save_twice(rank: int, root: Path) -> Any:
    for seed in (1, 2):
        training = Training(seed)
        training.train(2)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = training.state()
        dcp.save(state, storage_writer=PackStorageWriter(root), planner=planner)
    return whole(state)


def load_raw(rank: int, root: Path) -> Any:
    training = Training(7)
    training.train(1)
    state = training.state()
    dcp.load(state, storage_reader=PackStorageReader(root))
    training.resume(state)
    assert whole(training.model.state_dict()) == whole(state["model"])
    return whole(state)


def load_damaged(rank: int, root: Path) -> str:
    with pytest.raises(CheckpointException) as raw:
        load_raw(rank, root)
    assert {type(error) for error, _ in raw.value.failures.values()} == {CorruptCheckpointError}
    with pytest.raises(CorruptCheckpointError) as failure:
        load(Training(7).state(), root, timeout_s=60)
    assert failure.value.global_rank is not None
    assert failure.value.key
    return str(failure.value)


def test_fsdp2_state_is_saved_twice_and_loaded_by_more_ranks(tmp_path: Path) -> None:
    saved = done_by(2, save_twice, tmp_path)[0]

    assert len(list(tmp_path.glob("packs/*/*"))) == 2, "the packs of the first save are gone"
    assert done_by(4, load_raw, tmp_path) == [saved] * 4

    pack = damage(tmp_path)
    for text in done_by(4, load_damaged, tmp_path):
        assert "is damaged: bytes" in text
        assert str(pack) in text


def train_until_killed(rank: int, root: Path) -> None:
    training = Training(3)
    for step in (2, 4):
        training.train(2)
        save(training.state(), root, timeout_s=60)
        assert training.step == step
    training.train(1)
    began = time.monotonic()
    with pytest.raises((PeerLostError, PeerTimeoutError)) as failure:
        save(training.state(), root, planner=KilledAmid(rank), timeout_s=8)
    assert failure.value.global_rank == 0
    assert time.monotonic() - began < 25


class KilledAmid(DefaultSavePlanner):
    """Rank 0 is killed when it writes; the others are in a collective of DCP's then."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def resolve_data(self, write_item: Any) -> Any:
        if self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def resume_and_train(rank: int, root: Path) -> Any:
    training = Training(8)
    training.train(1)
    state = training.state()
    load(state, root, timeout_s=60)
    training.resume(state)
    assert training.step == 4
    training.train(3)
    return whole(training.state()["model"]), whole(training.state()["optimizer"])


def train_all(rank: int) -> Any:
    training = Training(3)
    training.train(7)
    return whole(training.state()["model"]), whole(training.state()["optimizer"])


def test_a_killed_training_resumes_at_another_world_size(tmp_path: Path) -> None:
    killed, *others = run_processes(4, train_until_killed, tmp_path)
    assert isinstance(killed, RankDiedError)
    assert others == [None] * 3

    assert done_by(2, resume_and_train, tmp_path) == done_by(2, train_all)


# Kinds of values


def values(rank: int, *, is_filled: bool) -> dict[str, Any]:
    """Tensors of many kinds, on meshes of the world; the same whole on any number of ranks."""
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator).to(dtype)
        return drawn if is_filled else torch.zeros_like(drawn)

    part = tensor(4, 3)
    rows = torch.arange(4).tensor_split(size)[rank]
    shards = [LocalShard.from_tensor_and_offsets(part[rows].clone(), [int(rows[0]), 0], rank)]
    columns = tensor(4, 5)[rows].tensor_split([2], 1)
    corners: list[tuple[int, ...]] = [(int(rows[0]), 0), (int(rows[0]), 2)]
    wrapper: Any = LocalShardsWrapper([column.clone() for column in columns], corners)
    wrapped = DTensor.from_local(
        wrapper, line, [Shard(0)], run_check=False, shape=torch.Size([4, 5]), stride=(5, 1)
    )
    return {
        "several of a rank": wrapped,
        "uneven": distribute_tensor(tensor(13, 5), line, [Shard(0)]),
        "empty on some": distribute_tensor(tensor(1, 5), line, [Shard(0)]),
        "last dim": distribute_tensor(tensor(3, 7), line, [Shard(1)]),
        "replicated": distribute_tensor(tensor(3), line, [Replicate()]),
        "grid": distribute_tensor(tensor(9, 5), grid, [Shard(0), Shard(1)]),
        "grid, one dim": distribute_tensor(tensor(8, 5), grid, [Shard(0), Shard(0)]),
        "half replicated": distribute_tensor(tensor(9, 5), grid, [Replicate(), Shard(1)]),
        "plain": tensor(4, 5).t(),
        "scalar": tensor(),
        "none": tensor(0, 3),
        "half": tensor(300, 1000, dtype=torch.bfloat16),
        "legacy": init_from_local_shards(shards, [4, 3]),
        "list": [tensor(2), "text" if is_filled else "", tensor(2)],
        "array": np.arange(3) if is_filled else None,
        "number": 1.5 if is_filled else None,
        "by number": Counter({3: 7 if is_filled else 1}),
        "by numbers": {0: [{1: "text" if is_filled else ""}]},
    }


def plain(state: dict[str, Any]) -> Any:
    rows = {
        "legacy": state.pop("legacy").local_shards()[0].tensor,
        "several of a rank": torch.cat(state.pop("several of a rank").to_local().local_shards(), 1),
    }
    odd: dict[str, Any] = {}
    for key, tensor in rows.items():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, bytes_of(tensor))
        odd[key] = b"".join(parts)
    odd["list"] = [whole(value) for value in state["list"]]
    assert isinstance(state["by number"], Counter)
    return whole(state) | odd | {"array": np.asarray(state["array"]).tolist()}


def save_values(rank: int, root: Path) -> Any:
    state = values(rank, is_filled=True)
    save(state, root, timeout_s=60)
    return plain(state)


def load_values(rank: int, root: Path) -> Any:
    state = values(rank, is_filled=False)
    load(state, root, timeout_s=60)
    return plain(state)


def test_values_of_all_kinds_are_loaded_on_other_meshes(tmp_path: Path) -> None:
    saved = done_by(4, save_values, tmp_path)[0]
    assert done_by(2, load_values, tmp_path) == [saved] * 2

    # DCP's own way to load all without a state dict, which needs to know where values stood.
    found = _load_state_dict_from_keys(storage_reader=PackStorageReader(tmp_path))
    assert [whole(value) for value in found["list"]] == saved["list"]
    assert whole(found["grid"]) == saved["grid"]


def strided(seed: int) -> Any:
    """Weights that FSDP2 has cut, unevenly; on four ranks strided, after tensor parallelism has."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    if dist.get_world_size() == 4:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=mesh["tp"])
    return model.state_dict()


def save_strided(rank: int, root: Path) -> Any:
    state = strided(5)
    save({"model": state}, root, timeout_s=60)
    return whole(state)


def load_strided(rank: int, root: Path) -> Any:
    state = {"model": strided(6)}
    load(state, root, timeout_s=60)
    return whole(state["model"])


def test_strided_shards(tmp_path: Path) -> None:
    saved = done_by(4, save_strided, tmp_path)[0]
    for size in (4, 2):
        assert done_by(size, load_strided, tmp_path) == [saved] * size


def save_in_background(rank: int, root: Path, kind: str) -> Any:
    allow_processes()
    state = values(rank, is_filled=True)
    del state["legacy"], state["several of a rank"]
    numbers = torch.view_as_complex(torch.arange(8.0).reshape(4, 2))
    state["conjugate"], state["negative"] = numbers.conj(), numbers.conj().imag
    for number in (1, 2):
        state["number"] = number
        future: Any = dcp.async_save(
            state,
            storage_writer=PackStorageWriter(root),
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )
        future.result(100)
    bad: Any = dcp.async_save({"x": Foreign()}, storage_writer=PackStorageWriter(root))
    with pytest.raises(CheckpointException) as failure:
        bad.result(100)
    assert isinstance(failure.value.failures[0][0], UnsafeObjectError)
    loaded = values(rank, is_filled=False)
    del loaded["legacy"], loaded["several of a rank"]
    loaded["conjugate"], loaded["negative"] = torch.zeros_like(numbers), torch.zeros(4)
    load(loaded, root, timeout_s=60)
    assert loaded["number"] == 2
    assert loaded["conjugate"].imag.tolist() == loaded["negative"].tolist() == [-1, -3, -5, -7]
    assert whole(loaded["grid"]) == whole(state["grid"])


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_saves_in_the_background(kind: str, tmp_path: Path) -> None:
    done_by(2, save_in_background, tmp_path, kind, timeout_s=200)

    assert len(list(tmp_path.glob("packs/*/*"))) == 2


# Failures


class Foreign:
    """A class that is on no list."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign)

    __hash__ = None  # type: ignore[assignment]


class Broken:
    """A Stateful that fails on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank == 1:
            raise ValueError("its worker is gone")
        return {"position": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def require_named(act: Callable[[], Any], rank: int) -> None:
    """The failure of ``Broken`` under the key ``loader`` is raised on every rank."""
    error = raised(CheckpointError, act)
    assert (error.key, error.global_rank, isinstance(error, PeerError)) == ("loader", 1, rank == 0)
    assert "rank 1: loader: state_dict() failed: ValueError: its worker is gone" in str(error)
    assert rank == 0 or isinstance(error, ValueError)


class Unchecked(DefaultSavePlanner):
    """Writes what every rank holds, as it is."""

    def create_global_plan(self, all_plans: Any) -> Any:
        return all_plans, Metadata({})


def raised(kind: type[CheckpointError], act: Callable[[], Any]) -> CheckpointError:
    with pytest.raises(kind) as failure:
        act()
    return failure.value


def sharded(placement: Any) -> Any:
    return distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [placement])


def refuse_to_save(rank: int, root: Path) -> None:
    state: dict[str, Any] = {"w": sharded(Shard(0))}
    save(state, root / "good", timeout_s=60)
    files = sorted(path.name for path in root.rglob("*.safetensors"))

    def refused(kind: type[CheckpointError], new: dict[str, Any], **options: Any) -> Any:
        return raised(kind, lambda: save(new, root / "good", timeout_s=60, **options))

    twice = {"w": sharded(Replicate())}
    assert refused(CoverageError, twice, planner=Unchecked()).key == "w"
    assert refused(CheckpointExistsError, state, overwrite=False).global_rank == 0
    assert "Foreign" in str(refused(UnsafeObjectError, state | {"f": Foreign()}))
    sparse = {"w": torch.eye(3).to_sparse()} if rank == 1 else {"v": torch.zeros(3)}
    error = refused(CheckpointError, sparse)
    assert (error.global_rank, isinstance(error, PeerError)) == (1, rank == 0)
    assert error.key == "w"
    require_named(lambda: save({"loader": Broken(rank)}, root / "good", timeout_s=60), rank)
    error = refused(CheckpointError, {"f": lambda: 0})
    assert error.key == "f"
    assert raised(CoverageError, lambda: save(state, root / "part", no_dist=True)).key == "w"
    writer = PackStorageWriter(root / "good")
    with pytest.raises(StrategyError, match="use_collectives=False"):
        dcp.save(state, storage_writer=writer, use_collectives=False)
    dist.barrier()
    assert sorted(path.name for path in root.rglob("good/**/*.safetensors")) == files
    state["w"].to_local().zero_()
    load(state, root / "good", timeout_s=60)
    assert torch.equal(state["w"].full_tensor(), torch.arange(6.0))


def refuse_to_load(rank: int, root: Path) -> None:
    own = {"f": Foreign(), "w": torch.zeros(6)}
    save(own, root, allow=[Foreign], timeout_s=60)

    def refused(kind: type[CheckpointError], wanted: dict[str, Any], place: Path = root) -> Any:
        return raised(kind, lambda: load(wanted, place, timeout_s=60))

    missing = refused(ArrayNotFoundError, {"ww": torch.zeros(6)})
    assert (missing.key, missing.path) == ("ww", str(root))
    assert str(missing).endswith(f"no such key among the 2 in {root}; similar ones: w")
    larger = refused(PlanError, {"w": torch.zeros(7)})
    number = refused(PlanError, {"w": 0})
    for error in (larger, number):
        assert (error.key, error.path) == ("w", str(root))
    assert refused(UnsafeObjectError, {"f": 1}).key == "f"
    refused(CheckpointNotFoundError, own, root / "nothing")
    require_named(lambda: load({"loader": Broken(rank)}, root, timeout_s=60), rank)
    load(own, root, allow=[Foreign], timeout_s=60)
    assert own["f"] == Foreign()
    if rank == 0:
        (root / "index").write_bytes(b"{")
    dist.barrier()
    refused(CorruptCheckpointError, {"f": 1})
    with pytest.raises(CheckpointException, match="index is damaged") as raw:
        dcp.load({"f": 1}, storage_reader=PackStorageReader(root))
    assert isinstance(raw.value.failures[1][0], AssertionError)


def replace_files_of_dcp(_rank: int, root: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=root)
    error = raised(CheckpointError, lambda: load({"w": torch.zeros(2)}, root, timeout_s=60))
    assert "torch.distributed.checkpoint's own" in str(error)
    new = {"w": torch.full((2,), 2.0)}
    raised(CheckpointExistsError, lambda: save(new, root, overwrite=False, timeout_s=60))
    old = {"w": torch.zeros(2)}
    dcp.load(old, checkpoint_id=root)
    assert torch.equal(old["w"], torch.ones(2))
    save(new, root, timeout_s=60)
    with pytest.raises(CheckpointException, match="metadata"):
        dcp.load(old, checkpoint_id=root)
    load(old, root, timeout_s=60)
    assert torch.equal(old["w"], new["w"])


@pytest.mark.parametrize("body", [refuse_to_save, refuse_to_load, replace_files_of_dcp])
def test_failures_are_raised_on_every_rank_and_the_old_checkpoint_stays(
    body: Callable[..., None], tmp_path: Path
) -> None:
    done_by(2, body, tmp_path)


def come_late(rank: int, root: Path) -> None:
    if rank == 1:
        raised(PeerTimeoutError, lambda: save({"w": torch.zeros(3)}, root, timeout_s=3))
    dist.distributed_c10d._get_default_store().set(str(rank), "")
    dist.distributed_c10d._get_default_store().wait(["0", "1"])


def test_a_rank_that_does_not_come_is_waited_for_within_the_limit(tmp_path: Path) -> None:
    done_by(2, come_late, tmp_path)


# Other formats and tools


def shard_of(key: str, tensor: torch.Tensor | None, rank: int) -> ShardedTensor:
    data = torch.zeros(3, 4) if tensor is None else tensor[rank * 3 : rank * 3 + 3].clone()
    return ShardedTensor.from_rank_offsets(key, data, (0, rank, 2))


WEIGHT = torch.arange(24.0).reshape(6, 4)


def megatron_state(rank: int, _format: str) -> dict[str, Any]:
    return {
        "w": shard_of("w", WEIGHT, rank),
        "o": ShardedObject("o", ["a", 1], (1,), (0,), replica_id=rank),
        "g": ShardedObject("g", [rank], (2,), (rank,)),
    }


def exchange(rank: int, root: Path, formats: tuple[str, ...]) -> None:
    line = init_device_mesh("cpu", (2,))
    for name in formats:
        empty = torch.zeros_like(WEIGHT)
        state: dict[str, Any] = {
            "w": distribute_tensor(empty, line, [Shard(1)]),
            "o": None,
            "g/shard_1_2": None,
        }
        load(state, root / name, timeout_s=60)
        assert torch.equal(state["w"].full_tensor(), WEIGHT), name
        assert (state["o"], state["g/shard_1_2"]) == (["a", 1], [1]), name
    state |= {"new": torch.ones(2)}
    save(state, root / "dcp", timeout_s=60)
    wanted: dict[str, Any] = {
        "w": shard_of("w", None, rank),
        "o": ShardedObject("o", None, (1,), (0,), replica_id=rank),
    }
    loaded: Any = dist_ckpt_strategies.load(wanted, str(root / "dcp"))
    assert torch.equal(loaded["w"], WEIGHT[rank * 3 : rank * 3 + 3])
    assert loaded["o"] == ["a", 1]


def test_megatron_reads_what_dcp_saves_and_dcp_what_megatron_saves(tmp_path: Path) -> None:
    saved_by(2, megatron_state, tmp_path)
    done_by(2, exchange, tmp_path, ("pack", "zarr@1", "zarr@3", "torch_dist"))

    opened = dist_ckpt_strategies.open(tmp_path / "dcp")
    assert np.array_equal(opened["w"][...], WEIGHT.numpy())
    assert opened.objects["o/shard_0_1"] == ["a", 1]
    assert run("inspect", tmp_path / "dcp").exit_code == 0
    assert run("verify", tmp_path / "dcp").exit_code == 0
    dist_ckpt_strategies.convert(tmp_path / "dcp", tmp_path / "converted", "zarr@1")
    differing = run("diff", tmp_path / "dcp", tmp_path / "pack")
    assert "new" in differing.stdout
    assert run("diff", tmp_path / "dcp", tmp_path / "converted").exit_code == 0
    (tmp_path / "dcp" / "index").unlink()
    assert run("rebuild-index", tmp_path / "dcp").exit_code == 0
    assert run("diff", tmp_path / "dcp", tmp_path / "converted").exit_code == 0
    damage(tmp_path / "dcp")
    assert run("verify", tmp_path / "dcp").exit_code != 0


_WITHOUT_MEGATRON = """
import importlib, pkgutil, sys
from types import SimpleNamespace

sys.modules["megatron"] = None  # as where it is not installed

import numpy as np
import torch

import dist_ckpt_strategies
from dist_ckpt_strategies import convert, diff, open
from dist_ckpt_strategies.cli.app import main
from dist_ckpt_strategies.errors import MissingDependencyError
from dist_ckpt_strategies.integrations import dcp

path, state = sys.argv[1], {"w": torch.arange(6.0), "a": np.arange(3), "n": SimpleNamespace(x=1)}
dcp.save(state, path, no_dist=True)
loaded = {"w": torch.zeros(6), "a": None, "n": None}
dcp.load(loaded, path, no_dist=True)
assert loaded["w"].equal(state["w"]) and loaded["a"].tolist() == [0, 1, 2] and loaded["n"].x == 1
convert(path, path + "_t", ("torch_dist", 1))
assert diff(path, path + "_t").is_equal
assert open(path + "_t")["w"][:].tolist() == [0, 1, 2, 3, 4, 5]
try:
    dcp.shard_layout
except MissingDependencyError as error:
    assert "megatron-core" in str(error)
for module in pkgutil.walk_packages(dist_ckpt_strategies.__path__, "dist_ckpt_strategies."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except MissingDependencyError as error:
            assert "megatron" in str(error), error
            print("refused", module.name)
sys.argv = ["dist-ckpt", "verify", path]
main()
"""


def test_packs_of_dcp_do_without_megatron(tmp_path: Path) -> None:
    done = finished(sys.executable, "-c", _WITHOUT_MEGATRON, tmp_path / "c", limit_s=100.0)
    assert "is whole" in done.stdout
    assert "refused dist_ckpt_strategies.strategies.load" in done.stdout
    assert "refused dist_ckpt_strategies.cli.app" not in done.stdout
