"""A load fills the tensors that it is given, whatever dtype their arrays are stored in."""

import json
import logging
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numcodecs
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from torch.nn import Parameter

from dist_ckpt_strategies import LocalOptions, Options
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.strategies.local_replicated import LocalReplicatedLoadShardedStrategy
from dist_ckpt_strategies.strategies.safetensors import PackLoadShardedStrategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy
from tests.strategies.test_two_stage import memory_nbytes
from tests.support.entries import (
    FORMATS,
    PACKS,
    Entry,
    load,
    logged,
    prepare,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.sharding import (
    ALL_DTYPES,
    Cut,
    Part,
    held_by,
    on_grid,
    replicated,
    same_bits,
    sharded,
)
from tests.support.tensors import LAYOUTS

pytestmark = pytest.mark.multiprocess

BACKENDS = (*FORMATS, ("local_replicated", 1))
UNCHECKED: dict[str, Any] = {"validate_access_integrity": False}
"""Replicas ask for the same shards."""

LOCAL = LocalOptions(replication_jump=1, replication_factor=1)

CASTS = {
    "wider": (torch.bfloat16, torch.float32),
    "narrower": (torch.float32, torch.bfloat16),
    "to integers": (torch.float32, torch.int32),
    "from float8": (torch.float8_e5m2, torch.bfloat16),
    "same": (torch.float64, torch.float64),
}
"""Stored and wanted dtype, by the name of the array."""

NUM_CONVERTED = 4 * 4
"""Each is stored on two grids, by every rank, and in stacked layers."""


STRATEGIES: dict[tuple[str, int], Callable[..., Any]] = {
    ("zarr", 1): ZarrLoadShardedStrategy,
    PACKS: PackLoadShardedStrategy,
    ("local_replicated", 1): partial(LocalReplicatedLoadShardedStrategy, local=LOCAL),
}


def loaders(backend: tuple[str, int], options: Options | None = None) -> dict[str, Any]:
    """Ways to load; a wrapped strategy does not fill what this rank does not read."""
    plain = partial(STRATEGIES[backend], options=options)
    found = {"plain": plain(), "wrapped": FullyParallelLoadStrategyWrapper(plain())}
    if backend in FORMATS:
        over = partial(TwoStageDataParallelLoadShardedStrategy, base_strategy=plain())
        found |= {"two-stage": over(None), "two-stage in pairs": over(dist.new_subgroups(2)[0])}
    return found


def cuts() -> list[Cut]:
    return [
        cut
        for name, (dtype, _) in CASTS.items()
        for cut in (
            on_grid(f"{name}.grid", (8, 6), (4, 1), dtype=dtype),
            replicated(on_grid(f"{name}.all", (5, 4), (1, 1), size=1, dtype=dtype)),
            on_grid(f"{name}.layers", (4, 6), (4, 1), dtype=dtype, num_prepended=1),
            on_grid(f"{name}.regions", (12, 9), (4, 3), dtype=dtype),
        )
    ]


def content(cut: Cut, part: Part) -> torch.Tensor:
    """What is stored of a part: numbers that each dtype has, more or less."""
    numel = torch.Size(cut.shape).numel()
    numbers = torch.arange(numel, dtype=torch.float32).reshape(cut.shape) * 0.625 - 5
    return numbers[part.slices()].reshape(part.shape[cut.num_prepended :]).to(cut.dtype)


def converted(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=dtype).copy_(stored)


def request(rank: int, arrays: list[Cut], layout: str | None) -> dict[str, Any]:
    """ShardedTensors of the wanted dtypes, with data of sevens in some memory layout, or none."""
    found = {}
    for name, cut, part in held_by(rank, arrays):
        data, (_, dtype) = None, CASTS[cut.key.rpartition(".")[0]]
        if layout is not None:
            sevens = torch.full(part.shape[cut.num_prepended :], 7.0).to(dtype)
            data = LAYOUTS[layout](sevens) if sevens.dim() else sevens
        found[name] = sharded(cut, part, data, dtype=dtype)
    return found


def save_all(rank: int, backend: tuple[str, int], root: Path, arrays: list[Cut]) -> None:
    prepare(60, local=LOCAL)
    state = {n: sharded(cut, part, content(cut, part)) for n, cut, part in held_by(rank, arrays)}
    save(Entry.OURS, state, root, sharded_strategy=backend)


def load_in_every_way(rank: int, backend: tuple[str, int], root: Path) -> None:
    arrays = cuts()
    save_all(rank, backend, root, arrays)
    warned = logged(level=logging.WARNING)
    layouts = ("dense", "transposed", "parameter", None)
    for entry, (name, strategy) in product(Entry, loaders(backend).items()):
        for layout in layouts[entry is Entry.MEGATRON :: 2]:
            way = f"{entry} {name} {layout}"
            wanted = request(rank, arrays, layout)
            given = {key: value.data for key, value in wanted.items()}
            warned.clear()
            with cpu_stand_ins():  # the wrapper goes over CUDA
                loaded = load(entry, wanted, root, sharded_strategy=strategy, **UNCHECKED)
            for key, cut, part in held_by(rank, arrays):
                right = converted(content(cut, part), wanted[key].dtype)
                assert same_bits(loaded[key], right), (way, key)
                if name != "wrapped" and layout is not None:
                    assert loaded[key] is given[key], (way, key)
            assert len(warned) == (rank == 0), "rank 0, and no other, warns once of all"
            for fact in (
                f"requested: {NUM_CONVERTED}, ",
                "from float8.all (float8_e5m2 to bfloat16)",
            ):
                assert all(fact in text for text in warned), (way, warned)


def refuse_in_every_way(rank: int, backend: tuple[str, int], root: Path) -> None:
    """Only the last rank asks for another dtype than the stored one, for two of the arrays."""
    arrays = [on_grid(f"w{n}", (8, 6), (4, 1)) for n in range(4)]
    save_all(rank, backend, root, arrays)
    strict = loaders(backend, Options(timeout_s=60, strict_dtype=True)).values()
    ways = product([backend, *loaders(backend).values()], [Entry.OURS], [{"strict_dtype": True}])
    for strategy, entry, options in [*ways, *product(strict, Entry, [{}])]:
        wanted = {}
        for number, cut in enumerate(arrays):
            dtype = torch.float64 if rank == 3 and number > 1 else torch.float32
            data = torch.full((2, 6), 7.0, dtype=dtype)
            wanted[cut.key] = sharded(cut, cut.parts[rank], data, dtype=dtype)
        how = UNCHECKED | {"sharded_strategy": strategy} | options
        named = ("rank 3: w2", "float32 in the checkpoint", "float64 requested")
        with cpu_stand_ins():
            call = partial(load, entry, wanted, root, **how)
            require_refused(call, PlanError, *named, key="w2")
        assert all((value.data == 7).all() for value in wanted.values()), (strategy, entry)


def refuse_shared_memory(rank: int, backend: tuple[str, int], root: Path) -> None:
    """Of tensors whose elements share memory; no other tensor is filled either."""
    cut = on_grid("w", (8, 6), (4, 1))
    save_all(rank, backend, root, [cut])
    other = Parameter(torch.full((2, 6), 7.0))
    wanted = {
        "other": sharded(cut, cut.parts[rank], other),
        "w": sharded(cut, cut.parts[rank], torch.zeros(1, 6).expand(2, 6)),
    }
    call = partial(load, Entry.OURS, wanted, root, **UNCHECKED)
    require_refused(call, PlanError, "w: its elements share memory")
    assert (other == 7).all()


@pytest.mark.parametrize("act", [load_in_every_way, refuse_in_every_way, refuse_shared_memory])
@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_given_tensors_are_filled_in_their_own_dtype_or_refused_on_every_rank(
    backend: tuple[str, int], act: Callable[..., None], tmp_path: Path
) -> None:
    require_on_ranks(4, act, backend, tmp_path / "c1")


def load_every_pair(rank: int, backend: tuple[str, int], root: Path) -> None:
    """Every array in every dtype, many at once, padded, into memory with gaps, in small reads."""
    arrays = [on_grid(str(d), (6, 5), (1, 1), size=1, dtype=d) for d in ALL_DTYPES]
    save_all(rank, backend, root, arrays)
    part = Part(0, (0, 0), (9, 5))  # three rows more than are stored
    wanted, right = {}, {}
    for cut, dtype in product(arrays, ALL_DTYPES):
        name = f"{cut.key} to {dtype}"
        more = Cut(cut.key, part.shape, cut.dtype, (part,), (1, 1))
        data = LAYOUTS["every other element"](torch.ones(part.shape, dtype=torch.uint8).to(dtype))
        wanted[name] = sharded(more, part, data, dtype=dtype, allow_shape_mismatch=True)
        right[name] = torch.zeros(part.shape, dtype=torch.uint8).to(dtype)
        right[name][:6].copy_(content(cut, cut.parts[0]))
    given = {name: value.data for name, value in wanted.items()}
    plain = STRATEGIES[backend](options=Options(timeout_s=60, max_inflight_bytes=4096))
    ways = [plain]
    if backend in FORMATS:
        ways.append(TwoStageDataParallelLoadShardedStrategy(None, base_strategy=plain))
    for strategy in ways:
        loaded = load(Entry.OURS, wanted, root, sharded_strategy=strategy, **UNCHECKED)
        for name, tensor in right.items():
            assert loaded[name] is given[name], name
            assert same_bits(loaded[name], tensor), name
            given[name].detach().zero_()


LARGE = (4, 1 << 20)
LARGE_ARRAYS = [on_grid(f"w{n}", LARGE, (1, 1), size=1, dtype=torch.float32) for n in range(16)]
"""256 MiB, each in one chunk of format 1."""


def require_memory(backend: tuple[str, int], root: Path, dtype: torch.dtype, nbytes: int) -> None:
    wanted = {
        cut.key: sharded(cut, cut.parts[0], torch.zeros(LARGE, dtype=dtype), dtype=dtype)
        for cut in LARGE_ARRAYS
    }
    options = Options(timeout_s=60, max_inflight_bytes=32 << 20, io_threads=16)
    strategy = STRATEGIES[backend](options=options)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_nbytes("VmHWM")
    load(Entry.OURS, wanted, root, sharded_strategy=strategy)
    assert memory_nbytes("VmHWM") - before < nbytes


def load_large(rank: int, backend: tuple[str, int], root: Path) -> None:
    save_all(rank, backend, root, LARGE_ARRAYS)
    require_memory(backend, root, torch.float64, 128 << 20)


def load_compressed(rank: int, backend: tuple[str, int], root: Path) -> None:
    save_all(rank, backend, root, LARGE_ARRAYS)
    codec = numcodecs.Blosc(cname="lz4")
    for path in root.rglob(".zarray"):
        fields = json.loads(path.read_text()) | {"compressor": codec.get_config()}
        path.write_text(json.dumps(fields))
        (chunk,) = path.parent.glob("0*")
        chunk.write_bytes(codec.encode(chunk.read_bytes()))
    require_memory(backend, root, torch.float32, 256 << 20)  # an import takes 100 MiB


@pytest.mark.parametrize(
    ("backend", "act"),
    [*product(BACKENDS, [load_every_pair]), *product(FORMATS, [load_large])],
)
def test_a_conversion_is_that_of_copy_and_takes_no_second_copy_of_the_state(
    backend: tuple[str, int], act: Callable[..., None], tmp_path: Path
) -> None:
    require_on_ranks(1, act, backend, tmp_path / "c")


def test_no_more_chunks_are_decoded_at_a_time_than_the_memory_allows(tmp_path: Path) -> None:
    require_on_ranks(1, load_compressed, ("zarr", 1), tmp_path / "c")
