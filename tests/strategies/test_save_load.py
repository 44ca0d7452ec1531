"""What four gloo ranks save, four gloo ranks load: bit for bit, whatever its shape or cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from dist_ckpt_strategies import Options
from dist_ckpt_strategies.errors import CoverageError, DuplicateWriterError, PlanError
from dist_ckpt_strategies.strategies.tensorstore import TensorStoreLoadShardedStrategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy
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
    at_random,
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
from tests.support.tensors import LAYOUTS, transposed

pytestmark = pytest.mark.multiprocess

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


# Smaller checks, each on four ranks, by either entry; a check yields what is wrong


def only_main_replicas_are_written(rank: int, entry: Entry, root: Path) -> Iterator[str]:
    """Only the main replica holds the right content; tuples say which it is."""
    cut = on_grid("w", (8, 4), (4, 1), num_replicas=3)
    state = {
        name: sharded(
            found, part, part_of(found, part) if part.replica == 0 else torch.full(part.shape, 7.0)
        )
        for name, found, part in held_by(rank, [cut])
    }
    for tensor in state.values():
        tensor.replica_id = (0, tensor.replica_id, 0)
    save(entry, state, root)
    yield from differences(rank, [cut], load(entry, state_of(rank, [cut], no_data), root))


def a_shard_is_a_file_and_replicas_are_none(rank: int, entry: Entry, root: Path) -> Iterator[str]:
    cut = on_grid("w", (8, 4), (2, 2), num_replicas=2)
    buffer = in_runs("buffer", [100, 128, 411, 448, 512, 513, 1000, 1024])
    save(entry, state_of(rank, [cut, buffer]), root)
    dist.barrier()
    files = {key: sorted(path.name for path in (root / key).iterdir()) for key in ("w", "buffer")}
    if files["w"] != [".zarray", "0.0", "0.1", "1.0", "1.1"]:
        yield str(files["w"])
    if len(files["buffer"]) > 1 + len(buffer.parts):
        yield str(files["buffer"])


def staging_memory_may_be_small(rank: int, entry: Entry, root: Path) -> Iterator[str]:
    """So little that every chunk is assembled in a round of its own."""
    small = ZarrSaveShardedStrategy(
        options=Options(max_inflight_bytes=64, io_threads=1, timeout_s=60)
    )
    save(entry, state_of(rank, irregular()), root, sharded_strategy=small)
    loaded = load(entry, state_of(rank, irregular(), no_data), root)
    yield from differences(rank, irregular(), loaded)


def the_default_device_makes_no_difference(rank: int, entry: Entry, root: Path) -> Iterator[str]:
    """As after ``torch.set_default_device("cuda")``, which training scripts may call."""
    if entry is Entry.MEGATRON:
        return  # it makes tensors on that device itself
    cuts = [at_random("moving", (12, 10), 9), on_grid("w", (8, 4), (4, 2))]
    state = state_of(rank, cuts)
    with torch.device("meta"):
        save(entry, state, root)
        loaded = load(entry, state_of(rank, cuts, no_data), root)
    yield from differences(rank, cuts, loaded)


def conjugated(data: torch.Tensor) -> torch.Tensor:
    return data.conj().resolve_conj().conj()


def negative_view(data: torch.Tensor) -> torch.Tensor:
    """The values of ``data`` as the imaginary part of a conjugated tensor: a lazy negation."""
    return torch.complex(torch.zeros_like(data), -data).conj().imag


def in_a_graph(data: torch.Tensor) -> torch.Tensor:
    return Parameter(data) * 1


def tensors_of_any_memory_layout_are_saved(rank: int, entry: Entry, root: Path) -> Iterator[str]:
    generator = torch.Generator().manual_seed(rank)
    real = torch.randn(6, 4, generator=generator)
    tensors = {name: layout(real) for name, layout in LAYOUTS.items()} | {
        "in a graph": in_a_graph(real),
        "conjugated": conjugated(torch.randn(6, 4, dtype=torch.complex64, generator=generator)),
        "negative": negative_view(real),
        "expanded": real[:1].expand(real.shape),
        "bfloat16": transposed(real.bfloat16()),
        "bool": transposed(real > 0),
    }
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    cuts = {
        name: Cut(name, (24, 4), tensor.dtype, (Part(rank, (6 * rank, 0), (6, 4)),), (4, 1))
        for name, tensor in tensors.items()
    }
    save(entry, {n: sharded(cut, cut.parts[0], tensors[n]) for n, cut in cuts.items()}, root)
    wanted = {name: sharded(cut, cut.parts[0], None) for name, cut in cuts.items()}
    loaded = load(entry, wanted, root)
    yield from (n for n in cuts if not same_bits(loaded[n], expected[n]))
    yield from (f"{n} was changed" for n in cuts if not same_bits(tensors[n], expected[n]))


def tensors_of_any_memory_layout_are_filled(rank: int, entry: Entry, root: Path) -> Iterator[str]:
    real = on_grid("w", (12, 8), (4, 1))
    complex_ = on_grid("z", (12, 8), (4, 1), dtype=torch.complex64)
    save(entry, state_of(rank, [real, complex_]), root)
    kinds = {**LAYOUTS, "in a graph": in_a_graph, "negative": negative_view}
    for name, kind in (*kinds.items(), ("conjugated", conjugated)):
        cut = complex_ if name == "conjugated" else real
        target = kind(torch.zeros(3, 8, dtype=cut.dtype))
        loaded = load(entry, {"w": sharded(cut, cut.parts[rank], target)}, root)["w"]
        if loaded is not target or not same_bits(loaded, part_of(cut, cut.parts[rank])):
            yield name


def data_is_filled_in_its_own_dtype_and_a_shard_may_be_wanted_twice(
    rank: int, entry: Entry, root: Path
) -> Iterator[str]:
    cut = on_grid("w", (8, 4), (4, 1), dtype=torch.bfloat16)
    part, none = cut.parts[rank], sharded(cut, cut.parts[rank], None)
    save(entry, state_of(rank, [cut]), root)
    own, wider, shared = (torch.ones(2, 4, dtype=d) for d in (cut.dtype, torch.float32, cut.dtype))
    wanted = {
        "none": [none, none],
        "own": [sharded(cut, part, own), sharded(cut, part, torch.ones_like(own))],
        "wider": [sharded(cut, part, wider, dtype=wider.dtype)],
        "one memory": [sharded(cut, part, shared), sharded(cut, part, shared)],
    }
    loaded = load(entry, wanted, root, validate_access_integrity=False)
    expected = part_of(cut, part)
    if none.data is not None or loaded["own"][0] is not own or loaded["wider"][0] is not wider:
        yield "other tensors"
    for name, tensors in loaded.items():
        right = expected.float() if name == "wider" else expected
        yield from (name for tensor in tensors if not same_bits(tensor, right))
    replaced = sharded(cut, part, torch.ones(2, 4, dtype=cut.dtype))
    if rank == 1:
        replaced.data = torch.ones(4, 2, dtype=cut.dtype)
    refused = outcome(lambda: load(entry, {"w": replaced}, root))
    said = "rank 1: w: its data has shape (4, 2), its local_shape is (2, 4)"
    if not isinstance(refused, Failure) or refused.text != said:
        yield f"another shape: {refused}"


def load_directly_on_device_copies_into_the_callers_data(
    rank: int, entry: Entry, root: Path
) -> Iterator[str]:
    cut = on_grid("w", (8, 4), (4, 1), dtype=torch.bfloat16)
    part = cut.parts[rank]
    save(entry, state_of(rank, [cut]), root)
    options: dict[str, Any] = {
        "sharded_strategy": TensorStoreLoadShardedStrategy(load_directly_on_device=True),
        "validate_access_integrity": False,
    }
    own, wider = torch.ones(2, 4, dtype=torch.bfloat16), Parameter(torch.ones(2, 4))
    wanted = {"own": sharded(cut, part, own), "wider": sharded(cut, part, wider, dtype=wider.dtype)}
    loaded = load(entry, wanted, root, **options)
    expected = part_of(cut, part)
    if loaded["own"] is not own or not same_bits(own, expected):
        yield "own"
    if loaded["wider"] is not wider or not same_bits(wider, expected.float()):
        yield "wider"
    refused = outcome(lambda: load(entry, {"w": sharded(cut, part, None)}, root, **options))
    if "w: load_directly_on_device needs a ShardedTensor" not in refused.text:
        yield str(refused)


def a_vocabulary_that_grew_or_shrank_is_padded_or_clipped(
    rank: int, entry: Entry, root: Path
) -> Iterator[str]:
    """It grew so far that a rank has padding alone, too."""
    stored = on_grid("vocab", (12, 4), (4, 1))
    save(entry, state_of(rank, [stored]), root)
    for rows in (4, 8, 12, 16, 20, 32, 64):
        per_rank = rows // 4
        padded = torch.zeros(max(rows, 12), 4)
        padded[:12] = whole(stored)
        part = Part(rank, (rank * per_rank, 0), (per_rank, 4))
        cut = Cut("vocab", (rows, 4), torch.float32, (part,), (4, 1))
        for data in (None, torch.ones(per_rank, 4)):
            wanted = {"w": sharded(cut, part, data, allow_shape_mismatch=True)}
            if not same_bits(load(entry, wanted, root)["w"], padded[part.slices()]):
                yield f"{rows} rows"
    part = Part(rank, (rank * 5, 0), (5, 4))
    cut = Cut("vocab", (20, 4), torch.float32, (part,), (4, 1))
    refused = outcome(lambda: load(entry, {"w": sharded(cut, part, None)}, root))
    if "vocab: shape (12, 4) in the checkpoint, (20, 4) requested" not in refused.text:
        yield str(refused)


def shards_that_may_mismatch_are_saved(rank: int, entry: Entry, root: Path) -> Iterator[str]:
    part = Part(rank, (3 * rank, 0), (3, 4))
    cut = Cut("vocab", (12, 4), torch.float32, (part,), (4, 1))
    save(entry, {"w": sharded(cut, part, part_of(cut, part), allow_shape_mismatch=True)}, root)
    if not same_bits(load(entry, {"w": sharded(cut, part, None)}, root)["w"], part_of(cut, part)):
        yield "other content"


BAD_KEYS = (
    *("x" * 256, "ü" * 128, "a/" + "x" * 300, "a/" + "x" * 300 + "/b", "\ud800"),
    *("", "/", "a//b", "/absolute", "trailing/", ".", "..", "../outside", "a/../b", "a/./b"),
    *("nul\0", "a\\b", "common.pt", "metadata.json", "metadata.json/w", "a/metadata.json/w"),
    *("optimizer/common.pt", ".zarray", "a/.zarray", "rng/shard_0_1.pt", "locked.__lock"),
    *("w.__lock/x", ".removed-w", "a/.removed-w", ".partial-w"),
)
BELOW_ANOTHER = ("0", "1.2", ".zarray", ".zattrs", ".zgroup", "0/deeper")
"""Files of an array, in which there can be no other."""


def keys_that_no_file_system_takes_are_refused_by_name(
    rank: int, entry: Entry, root: Path
) -> Iterator[str]:
    for number, key in enumerate(BAD_KEYS):
        state = state_of(rank, [on_grid(key, (8,), (4,))], zeros)
        yield from problems(
            outcome(partial(save, entry, state, root / str(number))),
            PlanError,
            f"key {key!r} cannot be stored",
            key=key,
        )
    for below in BELOW_ANOTHER:
        cuts = [on_grid(key, (8,), (4,)) for key in ("a/b", f"a/b/{below}")]
        found = outcome(partial(save, entry, state_of(rank, cuts), root / "below"))
        yield from problems(found, PlanError, "cannot be stored")
    if (root.parent / "outside").exists() or list(root.rglob("metadata.json")):
        yield "something was written"


def shards_that_do_not_make_up_their_array_are_refused(
    rank: int, entry: Entry, root: Path
) -> Iterator[str]:
    """A gap, an overlap and ranks that disagree; Megatron's own checks are off."""

    def cut(key: str, size: int, *parts: tuple[int, int, int], dtype: Any = torch.float32) -> Cut:
        return Cut(key, (size,), dtype, tuple(Part(r, (a,), (n,)) for r, a, n in parts))

    odd = rank == 2
    own = (rank, 2 * rank, 2)
    cases: list[tuple[Cut, Any, str]] = [
        (cut("gap", 10, (0, 0, 4), (1, 5, 5)), CoverageError, "gap: main replicas cover 9 of 10"),
        (
            cut("overlap", 10, (0, 0, 6), (3, 5, 5)),
            DuplicateWriterError,
            "and [5:10] on rank 3",
        ),
        (cut("outside", 10, (2, 0, 11)), CoverageError, "outside: rank 2 holds [0:11]"),
        (cut("w", 8 + 8 * odd, own), PlanError, "w: array_shape (16,) on rank 2, (8,) on rank 0"),
        (cut("w", 8, own, dtype=torch.float16 if odd else torch.float32), PlanError, "on rank 2,"),
    ]
    for number, (found, kind, words) in enumerate(cases):
        call = partial(save, entry, state_of(rank, [found], zeros), root / str(number))
        yield from problems(outcome(partial(call, validate_access_integrity=False)), kind, words)


def tensors_without_plain_memory_are_refused(rank: int, entry: Entry, root: Path) -> Iterator[str]:
    """On rank 1 alone: no data, a sparse tensor, one on the meta device."""
    cut, fine = on_grid("w", (8, 4), (4, 1)), torch.ones(2, 4)
    bad = {"none": None, "sparse": fine.to_sparse(), "meta": torch.ones(2, 4, device="meta")}
    for name, data in bad.items():
        state = {"w": sharded(cut, cut.parts[rank], data if rank == 1 else fine)}
        yield from problems(
            outcome(partial(save, entry, state, root / name)), PlanError, "rank 1: w: "
        )


def problems(found: Any, kind: type[Exception], words: str, **fields: Any) -> Iterator[str]:
    """Unless it is an error of that class, in both families, with those words and fields."""
    if not isinstance(found, Failure) or kind.__name__ not in found.kinds:
        yield f"expected a {kind.__name__}: {words}; found {found}"
    elif not found.is_megatrons or words not in found.text:
        yield f"expected {words}, found {found}"
    elif any(getattr(found, name) != value for name, value in fields.items()):
        yield f"expected {fields}, found {found}"


CHECKS: tuple[Callable[[int, Entry, Path], Iterator[str]], ...] = (
    only_main_replicas_are_written,
    a_shard_is_a_file_and_replicas_are_none,
    staging_memory_may_be_small,
    the_default_device_makes_no_difference,
    tensors_of_any_memory_layout_are_saved,
    tensors_of_any_memory_layout_are_filled,
    data_is_filled_in_its_own_dtype_and_a_shard_may_be_wanted_twice,
    load_directly_on_device_copies_into_the_callers_data,
    a_vocabulary_that_grew_or_shrank_is_padded_or_clipped,
    shards_that_may_mismatch_are_saved,
    keys_that_no_file_system_takes_are_refused_by_name,
    shards_that_do_not_make_up_their_array_are_refused,
    tensors_without_plain_memory_are_refused,
)


def run_checks(rank: int, entry: Entry, scratch: Path) -> dict[str, list[str]]:
    prepare(60)
    return {
        check.__name__: outcome(lambda: [*check(rank, entry, scratch / str(number))])  # noqa: B023
        for number, check in enumerate(CHECKS)
    }


@pytest.fixture(scope="module", params=list(Entry))
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_processes(4, run_checks, request.param, tmp_path_factory.mktemp("c"), timeout_s=200)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_each_check_finds_nothing_wrong(check: str, checked: list[Any]) -> None:
    for found in checked:
        assert isinstance(found, dict), found
        assert found[check] == []
