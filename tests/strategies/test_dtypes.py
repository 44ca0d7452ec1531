"""A load fills the tensors that it is given, whatever dtype their arrays are stored in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.nn import Parameter

from dist_ckpt_strategies import LocalOptions, Options
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import DTypeMismatchError, PlanError
from dist_ckpt_strategies.strategies.local_replicated import LocalReplicatedLoadShardedStrategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import Format2LoadShardedStrategy, ZarrLoadShardedStrategy
from tests.support.entries import (
    Entry,
    load,
    prepare,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.groups import group_of_size
from tests.support.ranks import allow_torch_dist, run_processes
from tests.support.sharding import (
    ALL_DTYPES,
    Cut,
    Part,
    at_random,
    held_by,
    on_grid,
    replicated,
    same_bits,
    sharded,
)
from tests.support.tensors import LAYOUTS, dense

pytestmark = pytest.mark.multiprocess

BACKENDS = (("zarr", 1), ("zarr", 2), ("local_replicated", 1))
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
"""Each is stored on a grid, in random boxes, by every rank, and in stacked layers."""


STRATEGIES: dict[tuple[str, int], Callable[..., Any]] = {
    ("zarr", 1): ZarrLoadShardedStrategy,
    ("zarr", 2): Format2LoadShardedStrategy,
    ("local_replicated", 1): partial(LocalReplicatedLoadShardedStrategy, local=LOCAL),
}


def loaders(
    backend: tuple[str, int], options: Options | None = None
) -> Iterator[tuple[str, Any, bool]]:
    """Ways to load: a name, the strategy, and whether it fills what this rank does not read."""
    plain = STRATEGIES[backend]
    yield "plain", plain(options=options), True
    yield "wrapped", FullyParallelLoadStrategyWrapper(plain(options=options)), False
    if backend[0] == "zarr":
        base = plain(options=options)
        yield "two-stage", TwoStageDataParallelLoadShardedStrategy(None, base_strategy=base), True
        pair = group_of_size(min(2, dist.get_world_size()))
        strategy = TwoStageDataParallelLoadShardedStrategy(pair, base_strategy=base)
        yield "two-stage in pairs", strategy, True


def cuts() -> list[Cut]:
    """Arrays of every sharding and cast."""
    return [
        cut
        for name, (dtype, _) in CASTS.items()
        for cut in (
            on_grid(f"{name}.grid", (8, 6), (4, 1), dtype=dtype),
            replicated(on_grid(f"{name}.all", (5, 4), (1, 1), size=1, dtype=dtype)),
            on_grid(f"{name}.layers", (4, 6), (4, 1), dtype=dtype, num_prepended=1),
            at_random(f"{name}.boxes", (12, 9), 5, dtype=dtype),
        )
    ]


def content(cut: Cut, part: Part) -> torch.Tensor:
    """What is stored of a part: numbers that each dtype has, more or less."""
    numel = torch.Size(cut.shape).numel()
    numbers = torch.arange(numel, dtype=torch.float32).reshape(cut.shape) * 0.625 - 5
    return numbers[part.slices()].reshape(part.shape[cut.num_prepended :]).to(cut.dtype)


def wanted_dtype(cut: Cut) -> torch.dtype:
    """In which dtype an array is asked for."""
    return CASTS[cut.key.rpartition(".")[0]][1]


def converted(cut: Cut, part: Part) -> torch.Tensor:
    """What a load has to give, as ``copy_`` makes it."""
    stored = content(cut, part)
    return torch.empty(stored.shape, dtype=wanted_dtype(cut)).copy_(stored)


def request(rank: int, arrays: list[Cut], layout: str | None) -> dict[str, Any]:
    """ShardedTensors of the wanted dtypes, with data of sevens in some memory layout, or none."""
    found = {}
    for name, cut, part in held_by(rank, arrays):
        data = None
        if layout is not None:
            sevens = torch.full(part.shape[cut.num_prepended :], 7.0).to(wanted_dtype(cut))
            lay_out = LAYOUTS[layout] if sevens.dim() else dense
            data = lay_out(sevens)
        found[name] = sharded(cut, part, data, dtype=wanted_dtype(cut))
    return found


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """What this rank warns of."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dist_ckpt_strategies")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def save_all(rank: int, backend: tuple[str, int], root: Path, arrays: list[Cut]) -> None:
    prepare(60, local=LOCAL)
    state = {n: sharded(cut, part, content(cut, part)) for n, cut, part in held_by(rank, arrays)}
    save(Entry.OURS, state, root, sharded_strategy=backend)


def load_in_every_way(rank: int, backend: tuple[str, int], root: Path) -> None:
    arrays = cuts()
    save_all(rank, backend, root, arrays)
    for entry in Entry:
        for name, strategy, fills_all in loaders(backend):
            layouts = ("dense", "transposed", "parameter", None)
            for layout in layouts if entry is Entry.OURS else layouts[1::2]:
                way = f"{entry} {name} {layout}"
                wanted = request(rank, arrays, layout)
                given = {key: value.data for key, value in wanted.items()}
                with warnings_logged() as warned, cpu_stand_ins():  # the wrapper goes over CUDA
                    loaded = load(entry, wanted, root, sharded_strategy=strategy, **UNCHECKED)
                for key, cut, part in held_by(rank, arrays):
                    assert same_bits(loaded[key], converted(cut, part)), (way, key)
                    if fills_all and layout is not None:
                        assert loaded[key] is given[key], (way, key)
                assert is_right_warning(rank, warned), (way, warned)


def is_right_warning(rank: int, warned: list[str]) -> bool:
    """Whether rank 0, and no other, has warned once of all that was converted."""
    if rank != 0:
        return not warned
    facts = (f"requested: {NUM_CONVERTED}, ", "from float8.all (float8_e5m2 to bfloat16)")
    return len(warned) == 1 and all(fact in warned[0] for fact in facts)


def refuse_in_every_way(rank: int, backend: tuple[str, int], root: Path) -> None:
    """Only the last rank asks for another dtype than the stored one, for two of the arrays."""
    arrays = [on_grid(f"w{n}", (8, 6), (4, 1)) for n in range(4)]
    save_all(rank, backend, root, arrays)
    by_argument: dict[str, Any] = {"strict_dtype": True}
    ways: list[tuple[Any, Entry, dict[str, Any]]] = [(backend, Entry.OURS, by_argument)]
    ways += [(one, Entry.OURS, by_argument) for _, one, _ in loaders(backend)]
    for _, strategy, _ in loaders(backend, Options(timeout_s=60, strict_dtype=True)):
        ways += [(strategy, entry, {}) for entry in Entry]
    for strategy, entry, more in ways:
        wanted = {}
        for number, cut in enumerate(arrays):
            dtype = torch.float64 if rank == 3 and number > 1 else torch.float32
            data = torch.full((2, 6), 7.0, dtype=dtype)
            wanted[cut.key] = sharded(cut, cut.parts[rank], data, dtype=dtype)
        call = partial(load, entry, wanted, root, sharded_strategy=strategy, **UNCHECKED, **more)
        named = ("rank 3: w2", "float32 in the checkpoint", "float64 requested")
        with cpu_stand_ins():
            require_refused(call, DTypeMismatchError, *named, key="w2")
        assert all((value.data == 7).all() for value in wanted.values()), (strategy, entry)


def refuse_shared_memory(rank: int, backend: tuple[str, int], root: Path) -> None:
    """Data that is no memory of its own for each element; nothing else is filled either."""
    cut = on_grid("w", (8, 6), (4, 1))
    save_all(rank, backend, root, [cut])
    other = Parameter(torch.full((2, 6), 7.0))
    wanted = {
        "other": sharded(cut, cut.parts[rank], other),
        "w": sharded(cut, cut.parts[rank], torch.zeros(1, 6).expand(2, 6)),
    }
    call = partial(load, Entry.OURS, wanted, root, **UNCHECKED)
    require_refused(call, PlanError, "w: elements of its data share memory")
    assert (other == 7).all()


@pytest.mark.parametrize("act", [load_in_every_way, refuse_in_every_way, refuse_shared_memory])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_given_tensors_are_filled_in_their_own_dtype_or_refused_on_every_rank(
    backend: tuple[str, int], act: Callable[..., None], tmp_path: Path
) -> None:
    require_on_ranks(4, act, backend, tmp_path / "c1")


def load_over_torch_dist(rank: int, root: Path) -> None:
    """A base strategy that is not ours converts by itself, and says which dtypes are stored."""
    allow_torch_dist()
    size = dist.get_world_size()
    cut = replicated(on_grid("w", (8, 6), (1, 1), size=1, dtype=torch.bfloat16), size=size)
    part, theirs = cut.parts[rank], ("torch_dist", 1)
    strategy = TwoStageDataParallelLoadShardedStrategy(
        None, base_strategy=TorchDistLoadShardedStrategy()
    )
    with cpu_stand_ins():
        state = {"w": sharded(cut, part, content(cut, part))}
        save(Entry.MEGATRON, state, root, sharded_strategy=theirs)
        for layout in ("dense", "transposed"):
            data = LAYOUTS[layout](torch.full((8, 6), 7.0))
            wanted = {"w": sharded(cut, part, data, dtype=torch.float32)}
            loaded = load(Entry.OURS, wanted, root, sharded_strategy=strategy, **UNCHECKED)
            assert loaded["w"] is data
            assert same_bits(data, content(cut, part).float())
        for each in (strategy, theirs):
            data = torch.full((8, 6), 7.0)
            wanted = {"w": sharded(cut, part, data, dtype=torch.float32)}
            options: dict[str, Any] = {"sharded_strategy": each, "strict_dtype": True}
            call = partial(load, Entry.OURS, wanted, root, **options, **UNCHECKED)
            require_refused(call, DTypeMismatchError)
            assert (data == 7).all()


def test_tensors_are_filled_over_a_base_strategy_of_another_kind(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="without it torch_dist of Megatron-Core 0.16.1 hangs")
    (tmp_path / "c").mkdir()
    require_on_ranks(2, load_over_torch_dist, tmp_path / "c")


def load_every_pair(rank: int, backend: tuple[str, int], root: Path) -> None:
    """Every array in every dtype, many at once, padded, into memory with gaps, in small reads."""
    arrays = [on_grid(str(d), (6, 5), (1, 1), size=1, dtype=d) for d in ALL_DTYPES]
    save_all(rank, backend, root, arrays)
    rows = 9  # three more than are stored
    wanted, right = {}, {}
    for cut in arrays:
        for dtype in ALL_DTYPES:
            name = f"{cut.key} to {dtype}"
            part = Part(0, (0, 0), (rows, 5))
            more = Cut(cut.key, (rows, 5), cut.dtype, (part,), (1, 1))
            data = LAYOUTS["every other element"](torch.ones(rows, 5, dtype=torch.uint8).to(dtype))
            wanted[name] = sharded(more, part, data, dtype=dtype, allow_shape_mismatch=True)
            right[name] = torch.zeros(rows, 5, dtype=torch.uint8).to(dtype)
            right[name][:6].copy_(content(cut, cut.parts[0]))
    given = {name: value.data for name, value in wanted.items()}
    plain = STRATEGIES[backend](options=Options(timeout_s=60, max_inflight_bytes=4096))
    for strategy in (plain, TwoStageDataParallelLoadShardedStrategy(None, base_strategy=plain)):
        loaded = load(Entry.OURS, wanted, root, sharded_strategy=strategy, **UNCHECKED)
        for name, tensor in right.items():
            assert loaded[name] is given[name], name
            assert same_bits(loaded[name], tensor), name
            given[name].detach().zero_()


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=str)
def test_every_dtype_is_converted_to_every_other_as_copy_does(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    require_on_ranks(1, load_every_pair, backend, tmp_path / "c")


def load_large(rank: int, backend: tuple[str, int], root: Path) -> int:
    """By how many bytes a load that converts lets the process grow."""
    shape = (4, 1 << 20)
    arrays = [on_grid(f"w{n}", shape, (1, 1), size=1, dtype=torch.float32) for n in range(16)]
    save_all(rank, backend, root, arrays)
    targets = {cut.key: torch.zeros(shape, dtype=torch.float64) for cut in arrays}
    wanted = {
        cut.key: sharded(cut, cut.parts[0], targets[cut.key], dtype=torch.float64) for cut in arrays
    }
    strategy = STRATEGIES[backend](options=Options(timeout_s=60, max_inflight_bytes=32 << 20))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak_nbytes()
    load(Entry.OURS, wanted, root, sharded_strategy=strategy)
    return _peak_nbytes() - before


def _peak_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=str)
def test_a_conversion_takes_no_second_copy_of_the_state(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    (grown,) = run_processes(1, load_large, backend, tmp_path / "c")

    assert isinstance(grown, int), grown
    assert grown < 128 << 20  # the stored form of all arrays together is 256 MiB
