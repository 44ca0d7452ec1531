"""Load one GPT-like state on every rank of a group, read once or by each, beside a baseline.

    python benchmarks/two_stage.py --out two_stage.jsonl
    python benchmarks/two_stage.py --smoke

All ranks want the whole state, as data-parallel replicas do. Alternating candidates, medians; from
a memory file system, and from a disk whose files the page cache has forgotten. A load fills
tensors that are already there and have been used: a candidate that returns new ones pays for the
copy. Every load is checked. The first round is not counted.

The baseline of a round is the longer of two things: each rank reads its share of the bytes from a
file of its own, in one stream; each rank sends its share to all others, over two gloo groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import torch
import typer
from torch import distributed as dist

from benchmarks.candidates.one_state import (
    TORCH_DIST,
    ZARR,
    Candidate,
    Make,
    Megatron,
    Tensors,
    raw_flushed,
    stand_in_for_cuda,
    zarr,
)
from benchmarks.common.command_line import Comparison, Output, comparison_command
from benchmarks.common.disks import file_system, workspace
from benchmarks.common.processes import RankContext, Ranks, join_gloo, quiet_imports
from benchmarks.common.rounds import Case, load_rounds
from benchmarks.common.states import GptSize, Shard, build_shards
from benchmarks.common.worker import Entry, Worker

with quiet_imports():
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    from dist_ckpt_strategies.cli.bench_rank import Target
    from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

READ_SHARES, SEND_SHARES = "raw read", "gloo exchange"
_MESSAGE_NBYTES = 32 << 20
_NUM_GROUPS = 2
"""Gloo moves twice as much over two groups side by side, and no more over four."""

_empty_like = torch.empty_like


def _two_stage_zarr(shards: tuple[Shard, ...]) -> Candidate:
    zarr(shards)
    return Megatron(shards, ZARR, _two_stage())


def _two_stage_torch_dist(shards: tuple[Shard, ...]) -> Candidate:
    stand_in_for_cuda()
    loader = _two_stage(base_strategy=TorchDistLoadShardedStrategy())
    return Megatron(shards, TORCH_DIST, loader)


def _two_stage(**options: Any) -> TwoStageDataParallelLoadShardedStrategy:
    """The strategy with its groups made, as a training script does it before it starts."""
    strategy = TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD, **options)
    strategy.maybe_init_gloo_group()
    return strategy


class _FullyParallel(Megatron):
    """Megatron's own way, for tensors of a CPU: it moves what it exchanges to CUDA, always.

    ``Tensor.cuda`` is the tensor itself here, and ``empty_like(tensor, device="cuda")`` is what
    ``receiving`` says. The exchange is ``broadcast``, its default and its fastest over gloo:
    ``gather_object`` pickles every tensor; ``gather_rounds`` gathers tensors of unequal shapes,
    which gloo refuses.
    """

    def __init__(
        self,
        shards: tuple[Shard, ...],
        receiving: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        stand_in_for_cuda()
        base = TorchDistLoadShardedStrategy()
        super().__init__(
            shards, TORCH_DIST, FullyParallelLoadStrategyWrapper(base, dist.group.WORLD)
        )
        self._receiving = receiving

    def load(self, directory: Path) -> Tensors:
        with (
            patch.object(torch.Tensor, "cuda", _itself),
            patch.object(torch, "empty_like", self._empty_like),
        ):
            return super().load(directory)

    def _empty_like(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            return self._receiving(tensor)
        return _empty_like(tensor, **options)


def _fully_parallel(shards: tuple[Shard, ...]) -> Candidate:
    """A CPU is what CUDA stands for: each tensor is received into a new one."""
    return _FullyParallel(shards, _empty_like)


def _fully_parallel_in_place(shards: tuple[Shard, ...]) -> Candidate:
    """As where the state lies on a GPU: each tensor is received where it is wanted."""
    return _FullyParallel(shards, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Sending:
    """Each rank sends its share of some memory to all others, and receives theirs. Nothing else."""

    def __init__(self, shares: Sequence[Shard]) -> None:
        self._shares = {share.key: share.tensor for share in shares}
        self._groups = [dist.new_group() for _ in range(_NUM_GROUPS)]
        parts = [torch.split(share.tensor, _MESSAGE_NBYTES) for share in shares]
        # In turn, so that at any time some ranks send and all receive.
        self._messages = [
            (source, own[number])
            for number in range(max(map(len, parts)))
            for source, own in enumerate(parts)
            if number < len(own)
        ]

    def save(self, directory: Path) -> None:
        """Nothing: what is sent lies in memory."""

    def load(self, directory: Path) -> Tensors:
        del directory
        works = [
            dist.broadcast(part, source, self._groups[number % _NUM_GROUPS], async_op=True)
            for number, (source, part) in enumerate(self._messages)
        ]
        for work in works:
            work.wait()
        return self._shares


MAKERS: Mapping[str, tuple[str, Make]] = MappingProxyType(
    {
        "two-stage, zarr 1": ("zarr 1", _two_stage_zarr),
        "two-stage, torch_dist": ("torch_dist", _two_stage_torch_dist),
        "fully parallel": ("torch_dist", _fully_parallel),
        "fully parallel, in place": ("torch_dist", _fully_parallel_in_place),
        "plain, zarr 1": ("zarr 1", zarr),
    }
)
"""For each candidate the directory that it reads, which the first one of it saves, and itself."""

_STORED = {READ_SHARES: "raw", SEND_SHARES: "raw", **{n: where for n, (where, _) in MAKERS.items()}}


def make_worker(size: GptSize, names: Sequence[str], context: RankContext) -> Worker:
    """One of the ranks that each hold the whole state. Collective."""
    join_gloo(context)
    shards = build_shards(size, 0, 1)
    target = Target({shard.key: shard.tensor for shard in shards})
    entries = _baselines(shards) | {
        name: Entry(MAKERS[name][1](shards), target) for name in names if name in MAKERS
    }
    return Worker(context, sum(shard.tensor.nbytes for shard in shards), entries)


def _baselines(shards: tuple[Shard, ...]) -> dict[str, Entry]:
    """Read and exchange of the state as one run of bytes, of which each rank has a share.

    Nobody overwrites what a rank sends but the read, with what it has stored itself.
    """
    num_ranks = dist.get_world_size()
    state = torch.cat([shard.tensor.view(-1).view(torch.uint8) for shard in shards])
    shares = [
        Shard(f"share {rank}", 0, rank, num_ranks, part)
        for rank, part in enumerate(state.tensor_split(num_ranks))
    ]
    own = shares[dist.get_rank()]
    others = {share.key: share.tensor for share in shares if share is not own}
    return {
        READ_SHARES: Entry(raw_flushed((own,)), Target({own.key: own.tensor})),
        SEND_SHARES: Entry(_Sending(shares), Target(others)),
    }


def _save_all(ranks: Ranks, names: Sequence[str], directory: Path) -> dict[str, Path]:
    """Store the state once in each of the forms that are loaded; where each candidate finds it."""
    stored = {name: directory / _STORED[name] for name in names}
    for target in dict.fromkeys(stored.values()):
        target.mkdir()
        saver = next(name for name in names if stored[name] == target)
        ranks.step("save", saver, target)
        ranks.step("flush", target)
    return stored


@comparison_command(list(_STORED), (READ_SHARES, SEND_SHARES))
def main(
    comparison: Comparison,
    output: Output,
    *,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Replicas.", show_default="2 and 4")
    ] = None,
) -> None:
    """Load one GPT-like state on every rank of a group with every candidate in turn."""
    for size in comparison.sizes:
        for num_ranks in ranks or (2, 4):
            _run_group(size, num_ranks, comparison, output)


def _run_group(size: GptSize, num_ranks: int, comparison: Comparison, output: Output) -> None:
    args = ("benchmarks.two_stage", size, comparison.names)
    with Ranks(num_ranks, *args, timeout_s=comparison.timeout_s) as ranks:
        nbytes = ranks.step("nbytes").values[0]
        for place in comparison.places:
            case = Case(file_system(place), nbytes, size.num_arrays, num_ranks, num_ranks)
            with workspace(place) as directory:
                stored = _save_all(ranks, comparison.names, directory)
                step = case.loads[-1]  # cold, where there is such a thing
                rounds = load_rounds(ranks, case, step, stored, comparison.repetitions)
                output.write_samples(case, rounds)


if __name__ == "__main__":
    typer.run(main)
