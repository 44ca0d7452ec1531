"""Load one GPT-like state on every rank of a group, read once or by each, beside a baseline.

    python benchmarks/two_stage.py --out two_stage.jsonl

All ranks request the whole state, as data-parallel replicas do; from a memory file system, and from
a disk whose files are not in the page cache.

The baseline is ``raw read``: each rank reads its share of the bytes from a file of its own, in one
stream, and then the others' from the page cache, which the ranks of one host share. ``gloo
exchange`` is what ranks of different hosts would do instead: each sends its share to all others,
over two groups.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import torch
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch import distributed as dist

from benchmarks.common import rounds
from benchmarks.common.command_line import Parser, open_output, run_cases
from benchmarks.page.subjects import PARALLEL, READ_SHARES, SEND_SHARES
from dist_ckpt_strategies.cli.bench_rank import (
    PACKS,
    TORCH_DIST,
    ZARR_1,
    Candidate,
    GptSize,
    Megatron,
    Sample,
    Shard,
    Shards,
    Target,
    Tensors,
    build_shards,
)
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

_BASELINES = (READ_SHARES, SEND_SHARES)
_MESSAGE_NBYTES = 32 << 20
_NUM_GROUPS = 2
"""Gloo moves twice as much over two groups side by side, and no more over four."""

_empty_like = torch.empty_like


def _two_stage_packs(shards: Shards) -> Candidate:
    return Megatron(shards, PACKS, _two_stage())


def _two_stage_zarr(shards: Shards) -> Candidate:
    return Megatron(shards, ZARR_1, _two_stage())


def _two_stage_torch_dist(shards: Shards) -> Candidate:
    return Megatron(shards, TORCH_DIST, _two_stage(base_strategy=TorchDistLoadShardedStrategy()))


def _two_stage(**options: Any) -> TwoStageDataParallelLoadShardedStrategy:
    """The strategy with its groups made, as a training script does it before it starts."""
    strategy = TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD, **options)
    strategy.maybe_init_gloo_group()
    return strategy


class _FullyParallel(Megatron):
    """Megatron-Core's wrapper, on the CPU: it always moves what it exchanges to CUDA.

    ``Tensor.cuda`` is the tensor itself here, and ``empty_like(tensor, device="cuda")`` is what
    ``receive_into`` returns. The exchange is ``broadcast``, its default and its fastest over gloo:
    ``gather_object`` pickles every tensor; ``gather_rounds`` gathers tensors of unequal shapes,
    which gloo refuses.
    """

    def __init__(
        self, shards: Shards, receive_into: Callable[[torch.Tensor], torch.Tensor] = _empty_like
    ) -> None:
        base = TorchDistLoadShardedStrategy()
        loader = FullyParallelLoadStrategyWrapper(base, dist.group.WORLD)
        super().__init__(shards, TORCH_DIST, loader)
        self._receive_into = receive_into

    def load(self, directory: Path) -> Tensors:
        with (
            patch.object(torch.Tensor, "cuda", _itself),
            patch.object(torch, "empty_like", self._empty_like),
        ):
            return super().load(directory)

    def _empty_like(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            return self._receive_into(tensor)
        return _empty_like(tensor, **options)


def _fully_parallel_in_place(shards: Shards) -> Candidate:
    """As where the state is on a GPU: each tensor is received where it is requested."""
    return _FullyParallel(shards, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _SharedRead:
    """Each rank reads its share of some memory, and then those that others have read before."""

    def __init__(self, shares: Shards) -> None:
        rank = dist.get_rank()
        self._own, *self._others = [*shares[rank:], *shares[:rank]]

    def save(self, directory: Path) -> None:
        _file(directory, self._own).write_bytes(self._own.tensor.numpy().data)

    def load(self, directory: Path) -> Tensors:
        self._read(directory, self._own)
        dist.barrier()
        for share in self._others:
            self._read(directory, share)
        return {share.key: share.tensor for share in (self._own, *self._others)}

    @staticmethod
    def _read(directory: Path, share: Shard) -> None:
        with _file(directory, share).open("rb") as file:
            file.readinto(share.tensor.numpy().data)


def _file(directory: Path, share: Shard) -> Path:
    return directory / f"share{share.part}.bin"


class _Exchange:
    """Each rank sends its share of some memory to all others, and receives theirs."""

    def __init__(self, shares: Shards) -> None:
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
        """Nothing: what is sent is in memory."""

    def load(self, directory: Path) -> Tensors:
        del directory
        works = [
            dist.broadcast(part, source, self._groups[number % _NUM_GROUPS], async_op=True)
            for number, (source, part) in enumerate(self._messages)
        ]
        for work in works:
            work.wait()
        return self._shares


MAKERS: Final[Mapping[str, Callable[[Shards], Candidate]]] = {
    "two-stage, packs": _two_stage_packs,
    "two-stage, zarr 1": _two_stage_zarr,
    "two-stage, torch_dist": _two_stage_torch_dist,
    PARALLEL: _FullyParallel,
    "fully parallel, in place": _fully_parallel_in_place,
    "plain, packs": lambda shards: Megatron(shards, PACKS),
    "plain, zarr 1": lambda shards: Megatron(shards, ZARR_1),
}
NAMES: Final = (READ_SHARES, SEND_SHARES, *MAKERS)


def _baselines(shards: Shards) -> dict[str, rounds.Entry]:
    """Read and exchange of the state as one run of bytes, of which each rank has a share."""
    num_ranks = dist.get_world_size()
    state = torch.cat([shard.tensor.view(-1).view(torch.uint8) for shard in shards])
    shares = [
        Shard(f"share {rank}", 0, rank, num_ranks, part)
        for rank, part in enumerate(state.tensor_split(num_ranks))
    ]
    own = shares[dist.get_rank()]
    all_shares = {share.key: share.tensor for share in shares}
    others = {key: tensor for key, tensor in all_shares.items() if key != own.key}
    return {
        READ_SHARES: rounds.Entry(_SharedRead(shares), Target(all_shares)),
        SEND_SHARES: rounds.Entry(_Exchange(shares), Target(others)),
    }


def measure(size: GptSize, place: Path, repetitions: int, names: list[str]) -> list[Sample]:
    """The loads in one place, on one of the ranks that each hold the whole state. Collective."""
    shards = build_shards(size, 0, 1)
    entries = _baselines(shards)
    entries |= rounds.entries_of(shards, MAKERS, [name for name in names if name in MAKERS])
    stored: dict[str, Path] = {}
    for name in names:
        stem = next((one for one in ("packs", "zarr") if one in name), "torch")
        target = place / (name if name in _BASELINES else stem)
        if target not in stored.values():
            rounds.on_first_rank(target.mkdir)
            entries[name].candidate.save(target)
            rounds.flush(target)
        stored[name] = target
    nbytes = size.nbytes * dist.get_world_size()
    step = rounds.load_steps(place)[-1]
    return list(rounds.load_rounds(entries, stored, step, repetitions, nbytes))


def main() -> None:
    """Load one GPT-like state on every rank of a group with every candidate in turn."""
    parser = Parser(__doc__)
    parser.add_comparison(NAMES, (READ_SHARES, SEND_SHARES))
    parser.add_repeated("ranks", (2, 4), "replicas", type=int)
    options = parser.parse()
    with open_output(options.out, __file__) as output:
        for num_ranks in options.ranks:
            run_cases(options, output, num_ranks, measure)


if __name__ == "__main__":
    main()
