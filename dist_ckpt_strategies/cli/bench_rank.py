"""Measurement of saves and loads: a state, ways to store it, and rounds of all ways in turn.

``dist-ckpt bench`` runs ``bench_on_rank`` on its ranks. The scripts in ``benchmarks`` use the same
parts.
"""

import importlib.util
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
import xxhash

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.bench import BASELINE, STEPS, drop_cache, limit_s, show_results
from dist_ckpt_strategies.cli.render import open_bars
from dist_ckpt_strategies.comm.base import (
    Communicator,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import rank_from_environment
from dist_ckpt_strategies.errors import needs_megatron_core

with needs_megatron_core():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

SECONDS: Final = "seconds"
ZARR_1: Final = ("zarr", 1)
PACKS: Final = ("safetensors", 1)
TORCH_DIST: Final = ("torch_dist", 1)
_NUM_LAYERS, _GRANULE = 24, 32

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one candidate in one round; values by name, ``SECONDS`` among them."""

    step: str
    candidate: str
    repetition: int
    values: Mapping[str, float]


# A state


@dataclass(frozen=True, slots=True)
class GptSize:
    """Dimensions of a GPT-like model: half of the layers are float32, half bfloat16.

    A layer has twelve arrays of about 12 * hidden**2 elements.
    """

    num_layers: int
    hidden: int
    vocabulary: int

    def arrays(self) -> Iterator[tuple[str, tuple[int, ...], int, torch.dtype]]:
        """Key, shape, tensor-parallel axis and dtype of every array."""
        h = self.hidden
        yield "embedding.word_embeddings.weight", (self.vocabulary, h), 0, torch.float32
        for layer in range(self.num_layers):
            dtype = torch.bfloat16 if layer % 2 else torch.float32
            for name, shape, axis in (
                ("input_layernorm.weight", (h,), 0),
                ("input_layernorm.bias", (h,), 0),
                ("self_attention.linear_qkv.weight", (3 * h, h), 0),
                ("self_attention.linear_qkv.bias", (3 * h,), 0),
                ("self_attention.linear_proj.weight", (h, h), 1),
                ("self_attention.linear_proj.bias", (h,), 0),
                ("pre_mlp_layernorm.weight", (h,), 0),
                ("pre_mlp_layernorm.bias", (h,), 0),
                ("mlp.linear_fc1.weight", (4 * h, h), 0),
                ("mlp.linear_fc1.bias", (4 * h,), 0),
                ("mlp.linear_fc2.weight", (h, 4 * h), 1),
                ("mlp.linear_fc2.bias", (h,), 0),
            ):
                yield f"decoder.layers.{layer}.{name}", shape, axis, dtype
        yield "decoder.final_layernorm.weight", (h,), 0, torch.float32
        yield "decoder.final_layernorm.bias", (h,), 0, torch.float32

    @property
    def nbytes(self) -> int:
        """Of the whole state."""
        return sum(math.prod(shape) * dtype.itemsize for _, shape, _, dtype in self.arrays())

    @property
    def num_arrays(self) -> int:
        """Of the whole state."""
        return sum(1 for _ in self.arrays())


def gpt_size(nbytes: int, num_parts: int = 1) -> GptSize:
    """A model of 24 layers, 291 arrays, whose whole state takes about ``nbytes``.

    Every array can be divided into ``num_parts`` equal parts.
    """
    granule, vocabulary = (-(-n // num_parts) * num_parts for n in (_GRANULE, 8192))
    most = math.isqrt(nbytes // (_NUM_LAYERS * 12 * 3))  # without the embedding
    sizes = [
        GptSize(_NUM_LAYERS, h, vocabulary) for h in range(granule, most + 2 * granule, granule)
    ]
    return min(sizes, key=lambda size: abs(size.nbytes - nbytes))


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``num_parts`` equal parts of an array along ``axis``."""

    key: str
    axis: int
    part: int
    num_parts: int
    tensor: torch.Tensor


Shards = Sequence[Shard]
Split = Literal["TP", "rows", "columns"]
"""Division of arrays: as by tensor parallelism, or all along the first or the last axis."""


def build_shards(size: GptSize, part: int, num_parts: int, split: Split = "TP") -> Shards:
    """One part of every array; the values of the whole are the same for every division.

    Takes the memory of one whole array beside the parts.
    """
    generator = torch.Generator().manual_seed(0)
    shards = []
    for key, shape, tensor_parallel_axis, dtype in size.arrays():
        axis = {"rows": 0, "columns": len(shape) - 1}.get(split, tensor_parallel_axis)
        whole = torch.empty(shape, dtype=dtype).normal_(generator=generator)
        own_part = whole.chunk(num_parts, axis)[part].clone(memory_format=torch.contiguous_format)
        shards.append(Shard(key, axis, part, num_parts, own_part))
    return shards


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def _digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_bytes(tensor))


class Target:
    """Tensors that loads fill, and what they are to be filled with: what they hold now."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._digests = {key: _digest(tensor) for key, tensor in tensors.items()}

    def clear(self) -> None:
        """Overwrite the tensors, so that a load that does nothing is found out."""
        for tensor in self._tensors.values():
            tensor.zero_()

    def accept(self, loaded: Tensors) -> None:
        """Copy from tensors that are not these themselves."""
        for key, tensor in self._tensors.items():
            if loaded[key].data_ptr() != tensor.data_ptr():
                tensor.copy_(loaded[key])

    def check(self, name: str) -> None:
        """Compare the tensors with what they are to hold.

        Raises:
            ValueError: one differs.
        """
        for key, tensor in self._tensors.items():
            if _digest(tensor) != self._digests[key]:
                raise ValueError(f"{key}: {name} loaded other values than were saved")


# Ways to store it


class Candidate(Protocol):
    """One way to save and load."""

    def save(self, directory: Path) -> None:
        """Store this rank's shards in ``directory``, which exists and is empty. Collective."""
        ...

    def load(self, directory: Path) -> Tensors:
        """This rank's shards as stored, by key; in the target's memory where that is possible.

        Collective.
        """
        ...


class Megatron:
    """``dist_checkpointing.save`` and ``load`` with a backend chosen by its tuple.

    Ranks beyond the parts of an array hold replicas of them. The loader is the backend's own where
    none is given. ``torch_dist`` gets stand-ins for two CUDA calls that it makes on any device.
    """

    def __init__(self, shards: Shards, backend: tuple[str, int], loader: Any = None) -> None:
        if backend == TORCH_DIST:
            stand_in_for_cuda()
        else:
            dist_ckpt_strategies.register()
        self._shards = shards
        self._rank = rank_from_environment()[0]
        self.backend = backend
        self._loader = loader

    def save(self, directory: Path) -> None:
        """See Candidate."""
        dist_checkpointing.save(self.state(), str(directory), self.backend)

    def load(self, directory: Path) -> Tensors:
        """See Candidate."""
        loaded = dist_checkpointing.load(self.sharded(), str(directory), self._loader)
        return {shard.key: loaded[shard.key] for shard in self._shards}

    def state(self) -> dict[str, Any]:
        """The state to save: the shards and a common state."""
        return {"iteration": 1, "args": {"hidden": 1}, **self.sharded()}

    def sharded(self) -> dict[str, Any]:
        """This rank's shards, as Megatron-Core describes them."""
        return {
            shard.key: ShardedTensor.from_rank_offsets(
                shard.key,
                shard.tensor,
                (shard.axis, shard.part, shard.num_parts),
                replica_id=self._rank // shard.num_parts,
            )
            for shard in self._shards
        }


class Packs(Megatron):
    """This package's own ``save`` and ``load``, which ``install`` gives to every stack."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards, PACKS)

    def save(self, directory: Path) -> None:
        """See Candidate."""
        dist_ckpt_strategies.save(self.state(), self.place(directory))

    def load(self, directory: Path) -> Tensors:
        """See Candidate."""
        loaded: Any = dist_ckpt_strategies.load(self.sharded(), self.place(directory))
        return {shard.key: loaded[shard.key] for shard in self._shards}

    def place(self, directory: Path) -> str | Path:
        """The path or URL of the checkpoint called ``directory``."""
        return directory


def stand_in_for_cuda() -> None:
    """Give CPU forms to the two CUDA calls that Megatron-Core's backend makes on any device."""
    setattr(torch.cuda, "synchronize", lambda _device=None: None)  # noqa: B010 - typed otherwise
    setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # noqa: B010


class Stream:
    """The baseline: the same bytes through one plain stream per rank, to a file of its own."""

    def __init__(self, shards: Shards, *, flushes: bool = True) -> None:
        self._tensors = {shard.key: shard.tensor for shard in shards}
        self._flushes = flushes

    def save(self, directory: Path) -> None:
        """See Candidate."""
        with _own_file(directory).open("wb") as file:
            for tensor in self._tensors.values():
                file.write(_bytes(tensor))
            file.flush()
            if self._flushes:
                os.fsync(file.fileno())

    def load(self, directory: Path) -> Tensors:
        """See Candidate."""
        path = _own_file(directory)
        with path.open("rb") as file:
            for tensor in self._tensors.values():
                if file.readinto(memory := _bytes(tensor)) != len(memory):
                    raise EOFError(f"{path}: expected more bytes")
        return self._tensors


def _own_file(directory: Path) -> Path:
    return directory / f"rank{rank_from_environment()[0]}.bin"


MAKERS: Final[Mapping[str, Callable[[Shards], Candidate]]] = {
    BASELINE: Stream,
    "zarr 1": partial(Megatron, backend=ZARR_1),
    "packs": Packs,
    "torch_dist": partial(Megatron, backend=TORCH_DIST),
}
"""Every candidate, the baseline first; made in a rank process, for its shards."""


# Rounds


def interleaved(names: Sequence[str], repetitions: int) -> Iterator[tuple[int, str]]:
    """Every name once per round, after a warm-up round, 0. The order is the same on every rank.

    Later rounds are in random order: what one leaves behind, and what the machine does meanwhile,
    affects each. No name follows itself, which would find caches as it left them; so two names
    alternate.
    """
    draw, order = random.Random(0), list(names)  # noqa: S311 - no secret
    for repetition in range(repetitions + 1):
        for name in order:
            yield repetition, name
        last = order[-1]
        draw.shuffle(order)
        while len(order) > 1 and order[0] == last:
            draw.shuffle(order)


def seconds_of(comm: Communicator, step: Callable[[], object]) -> float:
    """From the first rank's start of a step to the last rank's end. Collective."""

    def timed() -> list[float]:
        began = time.perf_counter()
        step()
        return [began, time.perf_counter()]

    times = run_and_gather(comm, timed)
    return float(max(ended for _, ended in times) - min(began for began, _ in times))


def measure(
    comm: Communicator, shards: Shards, workspace: Path, names: Sequence[str], repetitions: int
) -> Iterator[Sample]:
    """Save this rank's shards and load them with every candidate in turn. Collective.

    Files are dropped from the page cache before a load, and every load is checked. The workspace is
    an empty directory.
    """
    candidates = {name: MAKERS[name](shards) for name in names}
    target = Target({shard.key: shard.tensor for shard in shards})

    def forget(directory: Path) -> list[Path]:
        target.clear()
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        own_files = files[comm.rank :: comm.size]
        drop_cache(own_files)
        return own_files

    def finish(name: str, own_files: Sequence[Path]) -> None:
        target.check(name)
        # Truncated now and removed at the end: some file systems are slow at making directories
        # right after many files were removed.
        for path in own_files:
            os.truncate(path, 0)

    for repetition, name in interleaved(names, repetitions):
        candidate, directory = candidates[name], workspace / f"{name} {repetition}"
        run_on_first_rank(comm, directory.mkdir)
        seconds = seconds_of(comm, partial(candidate.save, directory))
        yield Sample(STEPS[0], name, repetition, {SECONDS: seconds})
        own_files = run_collectively(comm, partial(forget, directory))
        seconds = seconds_of(comm, lambda: target.accept(candidate.load(directory)))  # noqa: B023
        yield Sample(STEPS[1], name, repetition, {SECONDS: seconds})
        run_collectively(comm, partial(finish, name, own_files))


def bench_on_rank(workspace: Path, nbytes: int, repetitions: int, *, as_json: bool) -> None:
    """Measure in an empty directory; the first rank shows the results. Collective."""
    # What candidates need beside this package's own requirements.
    lacking = {} if importlib.util.find_spec("psutil") else {"torch_dist": "psutil"}
    names = [name for name in MAKERS if name not in lacking]
    comm = open_communicator(None, timeout_s=limit_s(nbytes), purpose="bench")
    size = gpt_size(nbytes, comm.size)
    samples = []
    with open_bars() as open_bar:
        show = open_bar("saving and loading")
        shards = build_shards(size, comm.rank, comm.size)
        num_samples = len(STEPS) * len(names) * (repetitions + 1)
        for sample in measure(comm, shards, workspace, names, repetitions):
            samples.append(asdict(sample))
            show(len(samples), num_samples)
    if comm.rank == 0:
        facts = {"path": str(workspace.parent), "num_ranks": comm.size, "repetitions": repetitions}
        facts |= {"nbytes": size.nbytes, "num_arrays": size.num_arrays}
        show_results(facts, samples, names, lacking, as_json=as_json)
