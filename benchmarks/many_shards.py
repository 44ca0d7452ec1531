"""Save and load states of many small shards, beside torch_dist.

    python benchmarks/many_shards.py --out many_shards.jsonl

Two ranks. ``arrays``: 10,000 arrays of 4 KB, each cut in two. ``experts``: one array of 48 layers x
128 experts, half of the experts on each rank; a load asks for all of them on each. Both ways are
called through their own ``save`` and ``load``; files are flushed before a save returns.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch import distributed as dist

import dist_ckpt_strategies
from benchmarks.common import rounds
from benchmarks.common.command_line import Parser, open_output
from benchmarks.common.disks import file_system, fresh, workspace
from dist_ckpt_strategies.cli.bench_rank import (
    SECONDS,
    TORCH_DIST,
    Sample,
    interleaved,
    stand_in_for_cuda,
)

State = dict[str, Any]
_NUM_RANKS: Final = 2
_NUM_LAYERS, _NUM_EXPERTS, _HIDDEN = 48, 128, 64
_CASES: Final = ("arrays", "experts")


def state_of(case: str, num_arrays: int, *, is_loaded: bool) -> State:
    """What a rank saves, or loads."""
    rank = dist.get_rank()
    if case == "arrays":
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.full((512,), float(number)), (0, rank, _NUM_RANKS)
            )
            for number, key in enumerate(f"layers.{n}.weight" for n in range(num_arrays))
        }
    own = range(_NUM_EXPERTS) if is_loaded else range(rank, _NUM_EXPERTS, _NUM_RANKS)
    return {
        f"{layer}.{expert}": ShardedTensor.from_rank_offsets(
            "experts.weight",
            torch.full((_HIDDEN, _HIDDEN), float(layer * _NUM_EXPERTS + expert)),
            (0, layer, _NUM_LAYERS),
            (1, expert, _NUM_EXPERTS),
            replica_id=rank if is_loaded else 0,
            prepend_axis_num=2,
        )
        for layer in range(_NUM_LAYERS)
        for expert in own
    }


CANDIDATES: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "packs": (dist_ckpt_strategies.save, dist_ckpt_strategies.load),
    "torch_dist": (
        lambda state, path: dist_checkpointing.save(state, str(path), TORCH_DIST),
        lambda state, path: dist_checkpointing.load(state, str(path)),
    ),
}


def measure(case: str, num_arrays: int, place: Path, repetitions: int) -> list[Sample]:
    """Saves and warm loads in one place, on one of the ranks. Collective."""
    stand_in_for_cuda()
    return list(_samples(case, num_arrays, place, repetitions))


def _samples(case: str, num_arrays: int, place: Path, repetitions: int) -> Iterator[Sample]:
    for repetition, name in interleaved(list(CANDIDATES), repetitions):
        save, load = CANDIDATES[name]
        rounds.on_first_rank(fresh, place, name)
        saved = state_of(case, num_arrays, is_loaded=False)
        seconds = rounds.timed(partial(save, saved, place / name))
        num_files = sum(path.is_file() for path in (place / name).rglob("*"))
        wanted = state_of(case, num_arrays, is_loaded=True)
        expected = {key: float(tensor.data.flatten()[0]) for key, tensor in wanted.items()}
        for tensor in wanted.values():
            tensor.data.zero_()
        loaded: list[State] = []
        load_seconds = rounds.timed(lambda: loaded.append(load(wanted, place / name)))  # noqa: B023
        for key, value in expected.items():
            if not bool((loaded[0][key] == value).all()):
                raise ValueError(f"{key}: {name} loaded other values than were saved")
        if repetition > 0:
            yield Sample("save", name, repetition, {SECONDS: seconds, "files": num_files})
            yield Sample("load", name, repetition, {SECONDS: load_seconds, "files": num_files})


def main() -> None:
    """Save and load states of many small shards with every candidate in turn."""
    parser = Parser(__doc__)
    parser.add_comparison(CANDIDATES, tuple(CANDIDATES), sizes_gb=(), repetitions=3)
    parser.add_repeated("case", list(_CASES), "only these", choices=_CASES)
    options = parser.parse()
    num_arrays = 20 if options.smoke else 10_000
    with open_output(options.out, __file__) as output:
        for case in options.case:
            for parent in options.directory:
                with workspace(parent) as place:
                    args = (case, num_arrays, place, options.repetitions)
                    samples, *_ = rounds.run_on_ranks(
                        _NUM_RANKS, measure, *args, timeout_s=options.timeout_s
                    )
                about = {
                    "source": case,
                    "file_system": file_system(parent),
                    "num_ranks": _NUM_RANKS,
                    "num_arrays": num_arrays if case == "arrays" else 1,
                    "nbytes": 2048 * _NUM_RANKS * num_arrays
                    if case == "arrays"
                    else 4 * _NUM_LAYERS * _NUM_EXPERTS * _HIDDEN**2,
                }
                output.write_samples(about, samples)


if __name__ == "__main__":
    main()
