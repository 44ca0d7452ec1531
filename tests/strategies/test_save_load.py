"""What four gloo ranks save, four gloo ranks load: bit for bit, whatever its shape or cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
import torch
import torch.distributed as dist
from torch.nn import Parameter

from dist_ckpt_strategies import Options
from dist_ckpt_strategies.errors import CoverageError, DuplicateWriterError, PlanError
from dist_ckpt_strategies.formats.zarr3 import array_directory
from dist_ckpt_strategies.strategies.tensorstore import TensorStoreLoadShardedStrategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.support.entries import Entry, Failure, load, outcome, prepare, save
from tests.support.layouts import (
    empties,
    irregular,
    irregular_otherwise,
    random_layouts,
    scattered,
    scattered_otherwise,
)
from tests.support.ranks import run_processes
from tests.support.sharding import (
    ALL_DTYPES,
    Cut,
    Part,
    differences,
    held_by,
    in_runs,
    no_data,
    on_grid,
    part_of,
    same_bits,
    sharded,
    state_of,
    whole,
    zeros,
)

pytestmark = pytest.mark.multiprocess

both_entries = pytest.mark.parametrize("entry", list(Entry))


def save_then_load(
    rank: int,
    entry: Entry,
    root: Path,
    saved: Sequence[Cut],
    wanted: Sequence[Cut],
    target: Callable[[Cut, Part], Any] = zeros,
) -> list[str]:
    """Save one cut of some arrays and load another; names what came back wrong."""
    prepare(60)
    save(entry, state_of(rank, saved), root)
    loaded = load(entry, state_of(rank, wanted, target), root)
    return differences(rank, wanted, loaded)


def files_of(root: Path, key: str) -> list[str]:
    return sorted(path.name for path in (root / key).iterdir())


GOOD_KEYS = (
    "module.decoder.layers.0.weight",
    "a/b/c",
    "a/b",
    "chained_0.optimizer.state/exp_avg",
    "spaces and $ \"quotes\" 'and' % such",
    "ünïcödé/重み",
    "x" * 255,
    "/".join(["y" * 200] * 4),
    "..hidden",
    "0.0",
    "0",
    "shard_0_1",
    "ends.pt",
    ".zarray.not",
)
KEYS_OF_FORMAT_2 = ("..", "manifest", "k" * 300, "metadata.json", "c.0")


def of_every_dtype(grid: tuple[int, ...]) -> list[Cut]:
    return [on_grid(f"x.{d}", (12, 8), grid, dtype=d) for d in ALL_DTYPES]


def layouts(backend: tuple[str, int]) -> Iterator[tuple[str, list[Cut], list[Cut]]]:
    """Name, what is saved, and what is loaded."""
    keys = GOOD_KEYS if backend == ("zarr", 1) else (*GOOD_KEYS, *KEYS_OF_FORMAT_2)
    yield "dtypes", of_every_dtype((2, 4)), of_every_dtype((4, 1))
    saved, wanted = ([on_grid(key, (8, 4), grid) for key in keys] for grid in ((4, 1), (2, 2)))
    yield "keys", saved, wanted
    yield "scattered", scattered(), scattered_otherwise()
    yield "irregular", irregular(), irregular_otherwise()
    yield "empty", empties(), empties()
    for seed in range(10):
        yield f"random {seed}", *random_layouts(seed)


def save_and_load_all(rank: int, backend: tuple[str, int], scratch: Path) -> list[str]:
    """Save and load every layout by either entry, and by a group; what came back wrong."""
    prepare(60)
    wrong = []
    two_stage = TwoStageDataParallelLoadShardedStrategy(
        dist.group.WORLD,
        max_inflight_bytes=20_000,  # several rounds
    )
    for number, (name, saved, wanted) in enumerate(layouts(backend)):
        for entry in Entry:
            if name == "empty" and entry is Entry.MEGATRON:
                continue  # its own checks divide by the extent
            root = scratch / f"{name} {entry}"
            save(entry, state_of(rank, saved), root, sharded_strategy=backend)
            for how in ({}, {"sharded_strategy": two_stage}):
                target = (zeros, no_data)[number % 2]
                loaded = load(entry, state_of(rank, wanted, target), root, **how)
                wrong += [f"{root.name} {how}: {key}" for key in differences(rank, wanted, loaded)]
    return wrong


@pytest.mark.parametrize("backend", [("zarr", 1), ("zarr", 2)], ids=str)
def test_every_layout_dtype_and_key_comes_back_bit_for_bit_in_another_layout(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    assert run_processes(4, save_and_load_all, backend, tmp_path, timeout_s=200) == [[]] * 4
    if backend == ("zarr", 2):
        for name, saved, _ in layouts(backend):
            for cut in saved[:2]:
                require_readable_without_us(tmp_path / f"{name} ours", cut)


def require_readable_without_us(root: Path, cut: Cut) -> None:
    """Plain TensorStore finds every element, and no chunk missing."""
    path = f"{root}/{array_directory(cut.key)}"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    stored = ts.open(spec | {"fill_missing_data_reads": False}, open=True).result()
    found = stored.read().result()
    assert found.shape == cut.shape
    for part in cut.parts:
        if part.replica == 0:
            assert found[part.slices()].tobytes() == bits_of(part_of(cut, part))


def bits_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    bits = torch.view_as_real(flat) if flat.is_complex() else flat
    return bits.view(torch.uint8).numpy().tobytes()


def save_odd_replicas(rank: int, entry: Entry, root: Path, cut: Cut) -> list[str]:
    """Only the main replica holds the right content; tuples say which it is."""
    prepare(60)
    state = {
        name: sharded(
            found,
            part,
            part_of(found, part) if part.replica == 0 else torch.full(part.shape, 7.0),
        )
        for name, found, part in held_by(rank, [cut])
    }
    for tensor in state.values():
        tensor.replica_id = (0, tensor.replica_id, 0)
    save(entry, state, root)
    return differences(rank, [cut], load(entry, state_of(rank, [cut], no_data), root))


@both_entries
def test_only_main_replicas_are_written(entry: Entry, tmp_path: Path) -> None:
    cut = on_grid("w", (8, 4), (4, 1), num_replicas=3)

    assert run_processes(4, save_odd_replicas, entry, tmp_path / "c", cut) == [[]] * 4


def save_with_room_for_little(rank: int, root: Path, cuts: Sequence[Cut]) -> list[str]:
    """So little staging memory that every chunk is assembled in a round of its own."""
    prepare(60, options=Options(max_inflight_bytes=64, io_threads=1))
    save(Entry.OURS, state_of(rank, cuts), root)
    return differences(rank, cuts, load(Entry.OURS, state_of(rank, cuts, no_data), root))


def test_irregular_shards_come_back_under_the_smallest_memory_budget(tmp_path: Path) -> None:
    assert run_processes(4, save_with_room_for_little, tmp_path / "c", irregular()) == [[]] * 4


def transposed(data: torch.Tensor) -> torch.Tensor:
    return data.t().contiguous().t()


def every_other_column(data: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(data.shape[0], 2 * data.shape[1], dtype=data.dtype)
    room[:, ::2] = data
    return room[:, ::2]


def parameter(data: torch.Tensor) -> torch.Tensor:
    return Parameter(data)


def in_a_graph(data: torch.Tensor) -> torch.Tensor:
    return Parameter(data) * 1


def inside_a_larger_storage(data: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(data.numel() + 3, dtype=data.dtype)
    room[3:] = data.reshape(-1)
    return room[3:].view(data.shape)


LAYOUTS = (transposed, every_other_column, parameter, in_a_graph, inside_a_larger_storage)


def conjugated(data: torch.Tensor) -> torch.Tensor:
    return data.conj().resolve_conj().conj()


def negative_view(data: torch.Tensor) -> torch.Tensor:
    """The values of ``data`` as the imaginary part of a conjugated tensor: a lazy negation."""
    return torch.complex(torch.zeros_like(data), -data).conj().imag


def expanded(data: torch.Tensor) -> torch.Tensor:
    return data[:1].expand(data.shape)


def save_odd_memory(rank: int, entry: Entry, root: Path) -> dict[str, Any]:
    """Save tensors whose memory is not a row after the other; what was loaded, and expected."""
    prepare(60)
    generator = torch.Generator().manual_seed(rank)
    real = torch.randn(6, 4, generator=generator)
    complex_ = torch.randn(6, 4, dtype=torch.complex64, generator=generator)
    tensors = {kind.__name__: kind(real.clone()) for kind in LAYOUTS}
    tensors |= {
        "conjugated": conjugated(complex_),
        "negative": negative_view(real),
        "expanded": expanded(real),
        "bfloat16.transposed": transposed(real.bfloat16()),
        "bool.transposed": transposed(real > 0),
    }
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    cuts = {
        name: Cut(name, (24, 4), tensor.dtype, (Part(rank, (6 * rank, 0), (6, 4)),), (4, 1))
        for name, tensor in tensors.items()
    }
    state = {name: sharded(cuts[name], cuts[name].parts[0], tensors[name]) for name in tensors}
    save(entry, state, root)
    assert all(same_bits(tensors[name], expected[name]) for name in tensors), "data was changed"
    wanted = {name: sharded(cut, cut.parts[0], None) for name, cut in cuts.items()}
    loaded = load(entry, wanted, root)
    return {name: same_bits(loaded[name], expected[name]) for name in tensors}


@both_entries
def test_tensors_of_any_memory_layout_are_saved(entry: Entry, tmp_path: Path) -> None:
    for result in run_processes(4, save_odd_memory, entry, tmp_path / "c"):
        assert isinstance(result, dict), result
        assert all(result.values()), result


def load_into_odd_memory(rank: int, entry: Entry, root: Path) -> dict[str, tuple[bool, bool]]:
    """Load into tensors of any layout: right content, and whether it is in the caller's memory."""
    prepare(60)
    cut = on_grid("w", (12, 8), (4, 1))
    other = on_grid("z", (12, 8), (4, 1), dtype=torch.complex64)
    save(entry, state_of(rank, [cut, other]), root)
    found = {}
    for kind in (*LAYOUTS, negative_view):
        target = kind(torch.zeros(3, 8))
        loaded = load(entry, {"w": sharded(cut, cut.parts[rank], target)}, root)["w"]
        right = same_bits(loaded, part_of(cut, cut.parts[rank]))
        found[kind.__name__] = (right, loaded is target)
    target = conjugated(torch.zeros(3, 8, dtype=torch.complex64))
    loaded = load(entry, {"z": sharded(other, other.parts[rank], target)}, root)["z"]
    found["conjugated"] = (same_bits(loaded, part_of(other, other.parts[rank])), loaded is target)
    return found


@both_entries
def test_tensors_of_any_memory_layout_are_filled(entry: Entry, tmp_path: Path) -> None:
    for result in run_processes(4, load_into_odd_memory, entry, tmp_path / "c"):
        assert isinstance(result, dict), result
        assert result == dict.fromkeys(result, (True, True))


def load_three_ways(rank: int, entry: Entry, root: Path) -> dict[str, Any]:
    prepare(60)
    cut = on_grid("w", (8, 4), (4, 1), dtype=torch.bfloat16)
    part = cut.parts[rank]
    save(entry, state_of(rank, [cut]), root)
    fitting = torch.ones(2, 4, dtype=torch.bfloat16)
    wider = torch.ones(2, 4, dtype=torch.float32)
    none = sharded(cut, part, None)
    wanted = {
        "none": none,
        "fitting": sharded(cut, part, fitting),
        "wider": sharded(cut, part, wider, dtype=torch.float32),
    }
    loaded = load(entry, wanted, root, validate_access_integrity=False)
    replaced = sharded(cut, part, torch.ones(2, 4, dtype=torch.bfloat16))
    if rank == 1:
        replaced.data = torch.ones(4, 2, dtype=torch.bfloat16)
    refused = outcome(lambda: load(entry, {"w": replaced}, root))
    expected = part_of(cut, part)
    return {
        "none": same_bits(loaded["none"], expected) and loaded["none"].device.type == "cpu",
        "request untouched": none.data is None,
        "fitting": same_bits(fitting, expected) and loaded["fitting"] is fitting,
        "wider": same_bits(wider, expected.float()) and loaded["wider"] is wider,
        "other shape refused": isinstance(refused, Failure)
        and refused.text == "rank 1: w: its data has shape (4, 2), its local_shape is (2, 4)",
    }


@both_entries
def test_data_is_filled_and_its_dtype_kept(entry: Entry, tmp_path: Path) -> None:
    for result in run_processes(4, load_three_ways, entry, tmp_path / "c"):
        assert isinstance(result, dict), result
        assert all(result.values()), result


def load_on_device(rank: int, entry: Entry, root: Path) -> dict[str, Any]:
    prepare(60)
    cut = on_grid("w", (8, 4), (4, 1), dtype=torch.bfloat16)
    part = cut.parts[rank]
    save(entry, state_of(rank, [cut]), root)
    expected = part_of(cut, part)
    strategy = TensorStoreLoadShardedStrategy(load_directly_on_device=True)
    own, wider = torch.ones(2, 4, dtype=torch.bfloat16), Parameter(torch.ones(2, 4))
    wanted = {"own": sharded(cut, part, own), "wider": sharded(cut, part, wider, dtype=wider.dtype)}
    loaded = load(entry, wanted, root, sharded_strategy=strategy, validate_access_integrity=False)
    refused = outcome(
        lambda: load(entry, {"w": sharded(cut, part, None)}, root, sharded_strategy=strategy)
    )
    return {
        "own": loaded["own"] is own and same_bits(own, expected),
        "wider": loaded["wider"] is wider and same_bits(wider, expected.float()),
        "refused": refused,
    }


@both_entries
def test_load_directly_on_device_copies_into_the_callers_data(entry: Entry, tmp_path: Path) -> None:
    for rank, result in enumerate(run_processes(4, load_on_device, entry, tmp_path / "c")):
        assert result["own"], (rank, result)
        assert result["wider"], (rank, result)
        assert "StrategyError" in result["refused"].kinds
        assert "w: load_directly_on_device needs a ShardedTensor" in result["refused"].text


def load_other_shapes(rank: int, entry: Entry, root: Path) -> dict[Any, Any]:
    """A padded vocabulary that grew, shrank, and grew so far that a rank has padding alone."""
    prepare(60)
    stored = on_grid("vocab", (12, 4), (4, 1))
    save(entry, state_of(rank, [stored]), root)
    content = whole(stored)
    found: dict[Any, Any] = {}
    for rows in (4, 8, 12, 16, 20, 32, 64):
        per_rank = rows // 4
        padded = torch.zeros(max(rows, 12), 4)
        padded[:12] = content
        part = Part(rank, (rank * per_rank, 0), (per_rank, 4))
        cut = Cut("vocab", (rows, 4), torch.float32, (part,), (4, 1))
        for data in (None, torch.ones(per_rank, 4)):
            wanted = {"w": sharded(cut, part, data, allow_shape_mismatch=True)}
            loaded = load(entry, wanted, root)["w"]
            found[rows, data is None] = same_bits(loaded, padded[part.slices()])
    part = Part(rank, (rank * 5, 0), (5, 4))
    cut = Cut("vocab", (20, 4), torch.float32, (part,), (4, 1))
    found["refused"] = outcome(lambda: load(entry, {"w": sharded(cut, part, None)}, root))
    return found


@both_entries
def test_a_vocabulary_that_grew_or_shrank_is_padded_or_clipped(
    entry: Entry, tmp_path: Path
) -> None:
    for result in run_processes(4, load_other_shapes, entry, tmp_path / "c"):
        refused = result.pop("refused")
        assert all(result.values()), result
        assert "ShapeMismatchError" in refused.kinds
        assert "vocab: shape (12, 4) in the checkpoint, (20, 4) requested" in refused.text


def save_padded_vocabulary(rank: int, entry: Entry, root: Path) -> bool:
    """Saved with ``allow_shape_mismatch``: the last rank's shard reaches beyond the array."""
    prepare(60)
    part = Part(rank, (3 * rank, 0), (3, 4))
    cut = Cut("vocab", (12, 4), torch.float32, (part,), (4, 1))
    save(entry, {"w": sharded(cut, part, part_of(cut, part), allow_shape_mismatch=True)}, root)
    loaded = load(entry, {"w": sharded(cut, part, None)}, root)["w"]
    return same_bits(loaded, part_of(cut, part))


@both_entries
def test_shards_that_may_mismatch_are_saved(entry: Entry, tmp_path: Path) -> None:
    assert run_processes(4, save_padded_vocabulary, entry, tmp_path / "c") == [True] * 4


BAD_KEYS = (
    *("x" * 256, "ü" * 128, "a/" + "x" * 300),
    *("", "/", "a//b", "/absolute", "trailing/", ".", "..", "../outside", "a/../b", "a/./b"),
    *("nul\0", "common.pt", "metadata.json", "locked.__lock"),
)


def save_bad_keys(rank: int, entry: Entry, root: Path) -> dict[str, Any]:
    prepare(60)
    return {
        key: outcome(
            partial(save, entry, state_of(rank, [on_grid(key, (8,), (4,))]), root / f"{number}")
        )
        for number, key in enumerate(BAD_KEYS)
    }


@both_entries
def test_keys_that_no_file_system_takes_are_refused_by_name(entry: Entry, tmp_path: Path) -> None:
    for result in run_processes(4, save_bad_keys, entry, tmp_path):
        assert isinstance(result, dict), result
        for key, failure in result.items():
            assert isinstance(failure, Failure), key
            assert PlanError.__name__ in failure.kinds, failure
            assert failure.is_megatrons
            assert f"key {key!r} cannot be stored" in failure.text
            assert failure.key == key
    assert not (tmp_path.parent / "outside").exists()
    assert not any(path.name == "metadata.json" for path in tmp_path.rglob("*"))


def load_twice(rank: int, entry: Entry, root: Path) -> list[bool]:
    prepare(60)
    cut = on_grid("w", (8, 4), (4, 1))
    part = cut.parts[rank]
    save(entry, state_of(rank, [cut]), root)
    one = sharded(cut, part, None)
    mine, yours, shared = torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4)
    wanted = {
        "same request": [one, one],
        "two requests": [sharded(cut, part, mine), sharded(cut, part, yours)],
        "one memory": [sharded(cut, part, shared), sharded(cut, part, shared)],
        "no data": [sharded(cut, part, None), sharded(cut, part, None)],
    }
    loaded = load(entry, wanted, root, validate_access_integrity=False)
    expected = part_of(cut, part)
    return [same_bits(tensor, expected) for pair in loaded.values() for tensor in pair]


@both_entries
def test_the_same_shard_may_be_wanted_twice(entry: Entry, tmp_path: Path) -> None:
    assert run_processes(4, load_twice, entry, tmp_path / "c") == [[True] * 8] * 4


def save_what_does_not_add_up(rank: int, entry: Entry, root: Path) -> dict[str, Any]:
    """A gap, an overlap and ranks that disagree; Megatron's own checks are off."""
    prepare(60)
    gap = Cut("gap", (10,), torch.float32, (Part(0, (0,), (4,)), Part(1, (5,), (5,))))
    overlap = Cut("overlap", (10,), torch.float32, (Part(0, (0,), (6,)), Part(3, (5,), (5,))))
    outside = Cut("outside", (10,), torch.float32, (Part(2, (0,), (11,)),))
    shape = Cut("w", (8 + 8 * (rank == 2),), torch.float32, (Part(rank, (2 * rank,), (2,)),))
    dtype = Cut(
        "w", (8,), torch.float16 if rank == 2 else torch.float32, (Part(rank, (2 * rank,), (2,)),)
    )
    cuts = {"gap": gap, "overlap": overlap, "outside": outside, "shape": shape, "dtype": dtype}
    made = {name: state_of(rank, [cut], zeros) for name, cut in cuts.items()}
    return {
        name: outcome(
            partial(save, entry, made[name], root / name, validate_access_integrity=False)
        )
        for name in cuts
    }


@both_entries
def test_shards_that_do_not_make_up_their_array_are_refused_on_every_rank(
    entry: Entry, tmp_path: Path
) -> None:
    kinds = {
        "gap": (CoverageError, "gap: main replicas cover 9 of 10"),
        "overlap": (DuplicateWriterError, "on rank 0 and [5:10] on rank 3"),
        "outside": (CoverageError, "outside: rank 2 holds [0:11]"),
        "shape": (PlanError, "w: array_shape (16,) on rank 2, (8,) on rank 0"),
        "dtype": (PlanError, "on rank 2,"),
    }
    for result in run_processes(4, save_what_does_not_add_up, entry, tmp_path):
        assert isinstance(result, dict), result
        for name, (kind, words) in kinds.items():
            assert isinstance(result[name], Failure), name
            assert kind.__name__ in result[name].kinds, result[name]
            assert result[name].is_megatrons
            assert words in result[name].text, result[name]


def save_unsavable(rank: int, entry: Entry, root: Path) -> dict[str, Any]:
    """On rank 1 alone: no data, a sparse tensor, one on the meta device, a dtype without a home."""
    prepare(60)
    cut = on_grid("w", (8, 4), (4, 1))
    part = cut.parts[rank]
    fine = torch.ones(2, 4)
    bad = {
        "no data": None,
        "sparse": fine.to_sparse(),
        "meta": torch.ones(2, 4, device="meta"),
    }
    found = {}
    for name, data in bad.items():
        state = {"w": sharded(cut, part, data if rank == 1 else fine)}
        found[name] = outcome(partial(save, entry, state, root / name))
    return found


@both_entries
def test_tensors_without_plain_memory_are_refused_on_every_rank(
    entry: Entry, tmp_path: Path
) -> None:
    for rank, result in enumerate(run_processes(4, save_unsavable, entry, tmp_path)):
        assert isinstance(result, dict), result
        for name, failure in result.items():
            assert isinstance(failure, Failure), (rank, name)
            assert PlanError.__name__ in failure.kinds, failure
            assert failure.text.startswith("rank 1: w: "), failure


@both_entries
def test_a_shard_is_a_file_and_replicas_are_none(entry: Entry, tmp_path: Path) -> None:
    cut = on_grid("w", (8, 4), (2, 2), num_replicas=2)
    buffer = in_runs("buffer", [100, 128, 411, 448, 512, 513, 1000, 1024])

    assert run_processes(4, save_then_load, entry, tmp_path / "c", [cut, buffer], [cut]) == [[]] * 4

    assert files_of(tmp_path / "c", "w") == [".zarray", "0.0", "0.1", "1.0", "1.1"]
    assert len(files_of(tmp_path / "c", "buffer")) <= 1 + len(buffer.parts)
