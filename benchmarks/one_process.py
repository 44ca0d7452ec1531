"""Save and load one GPT-like state in one process, beside Orbax and one stream.

    python benchmarks/one_process.py --out one_process.jsonl

Orbax does the same work only here: with several processes it saves arrays that JAX has sharded. Its
StandardCheckpointer gets numpy arrays that share the tensors' memory, with its default settings;
it returns new arrays, which are copied into the tensors. All flush their files before a save
returns. Without Orbax (`pip install orbax-checkpoint`) it is left out.
"""

import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import ml_dtypes
import torch

from benchmarks.common import rounds
from benchmarks.common.command_line import Parser, open_output, run_cases
from benchmarks.page.subjects import ORBAX
from dist_ckpt_strategies.cli.bench import BASELINE
from dist_ckpt_strategies.cli.bench_rank import (
    Candidate,
    GptSize,
    Packs,
    Sample,
    Shards,
    Stream,
    Tensors,
    build_shards,
)


class Orbax:
    """Orbax's StandardCheckpointer, with the tensors as numpy arrays."""

    def __init__(self, shards: Shards) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        from orbax import checkpoint  # noqa: PLC0415 - not all who run the benchmarks have it

        self._checkpointer: Any = checkpoint.StandardCheckpointer()
        self._arrays = {shard.key: _as_numpy(shard.tensor) for shard in shards}

    def save(self, directory: Path) -> None:
        """See Candidate."""
        self._checkpointer.save(directory / "state", self._arrays)
        self._checkpointer.wait_until_finished()

    def load(self, directory: Path) -> Tensors:
        """See Candidate."""
        arrays = self._checkpointer.restore(directory / "state", self._arrays)
        return {key: _as_tensor(array) for key, array in arrays.items()}


def _as_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _as_tensor(array: Any) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


MAKERS: Final[Mapping[str, Callable[[Shards], Candidate]]] = {
    BASELINE: Stream,
    "packs": Packs,
    ORBAX: Orbax,
}


def measure(size: GptSize, place: Path, repetitions: int, names: list[str]) -> list[Sample]:
    """All steps in one place."""
    entries = rounds.entries_of(build_shards(size, 0, 1), MAKERS, names)
    samples = list(rounds.save_rounds(entries, place, repetitions, size.nbytes))
    stored = {name: place / name for name in names}
    for step in rounds.load_steps(place):
        samples += rounds.load_rounds(entries, stored, step, repetitions, size.nbytes)
    return samples


def main() -> None:
    """Save and load in one process, beside Orbax."""
    parser = Parser(__doc__)
    parser.add_comparison(MAKERS, (BASELINE,), sizes_gb=(0.5,), in_memory=False)
    options = parser.parse()
    with open_output(options.out, __file__) as output:
        if ORBAX in options.names and not find_spec("orbax"):
            options.names.remove(ORBAX)
            output.skip(ORBAX, "orbax-checkpoint is not installed")
        run_cases(options, output, 1, measure)


if __name__ == "__main__":
    main()
