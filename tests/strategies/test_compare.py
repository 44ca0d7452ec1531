"""What a state and a checkpoint differ in: planted faults of a resume, and honest ones."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies import CompareReport, SavePolicy, TieredCheckpointManager, compare, save
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError
from dist_ckpt_strategies.integrations import dcp
from dist_ckpt_strategies.local import LocalCheckpointManager
from dist_ckpt_strategies.tools.diff import Difference
from tests.support.entries import PACKS, outcome, require_failure, require_on_ranks
from tests.support.ranks import allow_torch_dist

pytestmark = pytest.mark.multiprocess

SHAPE = (64, 2048)
"""Of what each rank holds: two ranges of digests and more in float32."""


class Training:
    """Rows of two layers and their moments on each rank, and what both hold alike."""

    def __init__(self, rank: int) -> None:
        seeds = torch.Generator().manual_seed(rank)
        self.rank = rank
        self.tensors = {
            f"{kind}layer{n}": torch.randn(SHAPE, generator=seeds)
            for n in range(2)
            for kind in ("", "optimizer.state.exp_avg.")
        }
        self.scale = torch.arange(5.0)
        self.random = {"cpu": torch.arange(8) + rank, "python": (3, rank)}
        self.num_done, self.scheduler = 7, {"num_steps": 7, "rates": [0.1, float("nan")]}

    def state(self, axis: int = 0) -> dict[str, Any]:
        shards = {
            key: ShardedTensor.from_rank_offsets(key, tensor, (axis, self.rank, 2))
            for key, tensor in self.tensors.items()
        }
        shards["scale"] = ShardedTensor.from_rank_offsets("scale", self.scale, replica_id=self.rank)
        random = ShardedObject("rng", self.random, (2,), (self.rank,))
        common = {"num_done": self.num_done, "scheduler": self.scheduler}
        return {"shards": shards, "random": random, **common}


def of_array(report: CompareReport) -> dict[str, Difference]:
    return {one.key: one.difference for one in report.arrays}


def of_object(report: CompareReport) -> set[str]:
    return {f"{one.key}{one.where}" for one in report.objects}


def every_fault_is_named(rank: int, root: Path) -> None:
    at = root / "iter_7"
    save(Training(rank).state(), at)
    own = partial(Training, rank)

    report = compare(own().state, at)
    assert report.is_equal, str(report)
    assert (report.num_arrays, report.num_objects, report.nbytes_read) == (5, 2, 0)
    assert report.nbytes == 2 * (4 * 4 * 64 * 2048 + 4 * 5)

    training = own()  # moments dropped
    training.tensors["optimizer.state.exp_avg.layer1"].zero_()
    report = compare(training.state(), at)
    assert of_array(report) == {"optimizer.state.exp_avg.layer1": Difference.VALUES}
    assert report.ranks == {"optimizer.state.exp_avg.layer1": (0, 1)}
    assert report.nbytes_read == 2 * 4 * 64 * 2048
    assert "0.0 in the state" in str(report)

    training = own()  # swapped layers
    tensors = training.tensors
    tensors["layer0"], tensors["layer1"] = tensors["layer1"], tensors["layer0"]
    assert of_array(compare(training.state(), at)) == dict.fromkeys(
        ("layer0", "layer1"), Difference.VALUES
    )

    require_one_report(rank, at)


def require_one_report(rank: int, at: Path) -> None:
    """What one rank finds is told on every rank."""
    own = partial(Training, rank)
    training = own()  # an optimizer of another rank, on rank 1
    training.tensors["optimizer.state.exp_avg.layer0"] = Training(0).tensors[
        "optimizer.state.exp_avg.layer0"
    ]
    report = compare(training.state(), at)
    assert report.ranks == {"optimizer.state.exp_avg.layer0": (1,)}

    training = own()  # a random state half restored; a scheduler at 0 on one rank; a replica
    training.random["python"] = (4, 4)
    training.scheduler = {"num_steps": 7 * (rank == 0), "rates": [0.1, float("nan")]}
    training.scale = training.scale + rank
    report = compare(training.state(), at)
    assert of_object(report) == {
        "rng/shard_0_2['python'][0]",
        "rng/shard_0_2['python'][1]",
        "rng/shard_1_2['python'][0]",
        "rng/shard_1_2['python'][1]",
        "common.pt['scheduler']['num_steps']",
    }
    assert of_array(report) == {"scale": Difference.VALUES}
    assert report.ranks["scale"] == report.ranks["common.pt"] == (1,)
    assert compare(training.state(), at, ignore=("rng", "scheduler", "scale")).is_equal
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, str(report))
    assert len(set(texts)) == 1, texts


def the_rest_is_named(rank: int, root: Path) -> None:
    """Names and shapes, dtypes, other layouts and formats, and damage."""
    at, own = root / "iter_7", partial(Training, rank)
    save(own().state(), at)
    training = own()
    training.tensors["layer9"] = training.tensors.pop("layer0")
    training.tensors["layer1"] = training.tensors["layer1"][:32]
    report = compare(training.state(), at)
    assert of_array(report) == {
        "layer0": Difference.ONLY_IN_A,
        "layer9": Difference.ONLY_IN_B,
        "layer1": Difference.SHAPE,
    }
    training = own()  # bfloat16 of what was saved is what a load gives; any other is not
    training.tensors["layer0"] = training.tensors["layer0"].bfloat16()
    training.tensors["layer1"] = training.tensors["layer1"].bfloat16() * 2
    report = compare(training.state(), at)
    assert [key for key, *_ in report.converted] == ["layer0", "layer1"]
    assert of_array(report) == {"layer1": Difference.VALUES}

    require_other_layouts_and_formats(rank, root)
    require_refused(rank, at)


def require_other_layouts_and_formats(rank: int, root: Path) -> None:
    at, own = root / "iter_7", partial(Training, rank)
    whole = [Training(r).tensors["layer0"] for r in (0, 1)]
    columns = own()  # the same array cut along the other dim: its blocks are read
    columns.tensors = {"layer0": torch.cat(whole).chunk(2, 1)[rank]}
    ignore = ("layer1", "optimizer.*")
    report = compare(columns.state(axis=1), at, ignore=ignore)
    assert report.is_equal, str(report)
    assert report.nbytes_read == 2 * 4 * 64 * 2048
    columns.tensors["layer0"] = columns.tensors["layer0"] + (rank == 1)
    assert compare(columns.state(axis=1), at, ignore=ignore).ranks == {"layer0": (1,)}
    allow_torch_dist()
    for name in ("zarr", "torch_dist"):
        with cpu_stand_ins():
            save(own().state(), root / name, (name, 1))
        report = compare(own().state(), root / name)
        assert report.is_equal, str(report)
        training = own()
        training.tensors["layer1"][rank, 5] += 1
        (found,) = compare(training.state(), root / name).arrays
        assert (found.key, found.index, found.num_differing) == ("layer1", (0, 5), 2)


def require_refused(rank: int, at: Path) -> None:
    """A main replica without data, and a checkpoint that is damaged where it has to be read."""
    training = Training(rank)
    hollow = training.state()
    hollow["shards"]["layer0"].data = None
    require_failure(outcome(lambda: compare(hollow, at)), PlanError, "layer0")
    dist.barrier()
    if rank == 0:
        for pack in at.glob("packs/*/*"):
            with pack.open("r+b") as file:
                file.seek(8192)
                file.write(b"damage")
    dist.barrier()
    training.tensors = {key: tensor + 1 for key, tensor in training.tensors.items()}
    require_failure(outcome(lambda: compare(training.state(), at)), CorruptCheckpointError)


def a_manager_checks_the_resume(rank: int, root: Path) -> None:
    def manager() -> TieredCheckpointManager:
        policy = SavePolicy(should_save=lambda step: "global" if step == 1 else "local")
        local = LocalCheckpointManager(root / "local")
        return TieredCheckpointManager(root / "global", local=local, policy=policy)

    for step in (1, 2):
        training = Training(rank)
        training.num_done = step
        with manager() as saving:
            assert saving.check_resume(training.state) is None
            assert saving.save(step, training.state)
        resumed = Training(rank)
        for tensor in resumed.tensors.values():
            tensor.zero_()
        resumed.num_done = 0
        with manager() as loading:
            loaded = loading.load_latest(resumed.state)
            assert loaded is not None
            assert loaded.tier == ("global" if step == 1 else "local")
            report = loading.check_resume(resumed.state)
            assert report is not None
            assert of_object(report) == {"common.pt['num_done']"}
            assert not report.arrays
            resumed.num_done = loaded.state["num_done"]
            report = loading.check_resume(resumed.state)
            assert report is not None
            assert report.is_equal, str(report)
            require_faults_found(loading, resumed, rank)


def require_faults_found(manager: TieredCheckpointManager, resumed: Training, rank: int) -> None:
    for key, tensor in resumed.tensors.items():  # an optimizer that was made anew
        if key.startswith("optimizer."):
            resumed.tensors[key] = torch.zeros_like(tensor)
    resumed.random = {"cpu": torch.arange(8), "python": (3, rank)}
    resumed.tensors["new"] = resumed.tensors.pop("layer0")
    report = manager.check_resume(resumed.state)
    assert report is not None
    assert of_array(report) == {
        "layer0": Difference.ONLY_IN_A,
        "new": Difference.ONLY_IN_B,
        "optimizer.state.exp_avg.layer0": Difference.VALUES,
        "optimizer.state.exp_avg.layer1": Difference.VALUES,
    }
    assert of_object(report) == {"rng/shard_1_2['cpu']"}
    assert report.ranks["rng/shard_1_2"] == (1,)


def padding_means_nothing(rank: int, root: Path) -> None:
    """As in flat buffers of Megatron-Core's distributed optimizer: it is uninitialised."""

    def state() -> dict[str, Any]:
        def part(start: int, data: torch.Tensor) -> Any:
            return ShardedTensor("moments", data, data.dtype, data.shape, (20,), (start,), None)

        marks = [LocalNonpersistentObject(is_padding) for is_padding in (False, True)]
        data = {"exp_avg": part(10 * rank, torch.full((9,), 1.0 + rank)), "padding": marks[0]}
        padding = {"exp_avg": part(10 * rank + 9, torch.rand(1) + 1), "padding": marks[1]}
        return {"optimizer": [[data, padding]]}

    save(state(), root)
    assert dist_ckpt_strategies.open(root)["moments"][9::10].tolist() == [0.0, 0.0]
    report = compare(state, root)
    assert report.is_equal, str(report)


def states_of_dcp_are_compared(rank: int, root: Path) -> None:
    model = torch.nn.Linear(64, 64)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    state = {"model": model.state_dict(), "scheduler": {"rate": 0.1, "step": 7}}
    dcp.save(state, root / "step_7")
    assert dcp.compare(state, root / "step_7").is_equal
    state["scheduler"] = {"rate": 0.1, "step": 0}
    if rank:
        with torch.no_grad():
            model.bias.add_(1)
    report = dcp.compare(state, root / "step_7")
    assert of_array(report) == {"model.bias": Difference.VALUES}
    assert report.ranks == {"model.bias": (1,), "scheduler.step/shard_0_1": (0, 1)}


def run_all(rank: int, root: Path) -> None:
    for check in (
        every_fault_is_named,
        the_rest_is_named,
        a_manager_checks_the_resume,
        padding_means_nothing,
        states_of_dcp_are_compared,
    ):
        check(rank, root / check.__name__)


def test_a_state_is_compared_with_a_checkpoint(tmp_path: Path) -> None:
    require_on_ranks(2, run_all, tmp_path, default=PACKS)
