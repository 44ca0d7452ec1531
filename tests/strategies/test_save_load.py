"""What four gloo ranks save, four gloo ranks load: bit for bit, whatever its shape or cut."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch.nn import Parameter

from dist_ckpt_strategies import Options
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.strategies.safetensors import (
    PackLoadShardedStrategy,
    PackSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.tensorstore import TensorStoreLoadShardedStrategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from tests.support.entries import (
    FORMATS,
    PACKS,
    Entry,
    load,
    logged,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.layouts import (
    empties,
    irregular,
    irregular_otherwise,
    random_layouts,
    scattered,
    scattered_otherwise,
)
from tests.support.ranks import allow_torch_dist
from tests.support.sharding import (
    ALL_DTYPES,
    Cut,
    Part,
    at_random,
    differences,
    held_by,
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


def of_every_dtype(grid: tuple[int, ...]) -> list[Cut]:
    return [on_grid(f"x.{d}", (12, 8), grid, dtype=d) for d in ALL_DTYPES]


def layouts(backend: tuple[str, int]) -> Iterator[tuple[str, list[Cut], list[Cut]]]:
    """Of these format ("zarr", 1) holds what lies on regular grids."""
    yield "dtypes", of_every_dtype((2, 4)), of_every_dtype((4, 1))
    saved, wanted = ([on_grid(key, (8, 4), grid) for key in GOOD_KEYS] for grid in ((4, 1), (2, 2)))
    yield "keys", saved, wanted
    yield "empty", empties(), empties()
    others = {"scattered": (scattered(), scattered_otherwise())}
    others |= {f"random {seed}": random_layouts(seed) for seed in range(6)}
    if backend == PACKS:
        others["irregular"] = irregular(), irregular_otherwise()
    for name, cuts in others.items():
        kept = [n for n, cut in enumerate(cuts[0]) if backend == PACKS or cut.grid is not None]
        yield name, [cuts[0][n] for n in kept], [cuts[1][n] for n in kept]


STRATEGIES: dict[tuple[str, int], tuple[Any, Any]] = {
    ("zarr", 1): (ZarrSaveShardedStrategy, ZarrLoadShardedStrategy),
    PACKS: (PackSaveShardedStrategy, PackLoadShardedStrategy),
}
SMALL = Options(max_inflight_bytes=64, io_threads=1, timeout_s=60)
"""So little memory that every chunk is assembled in a round of its own."""


def objects(rank: int, *, is_filled: bool) -> dict[str, Any]:
    """One that all ranks hold alike, and one of each rank."""
    own, everyones = ([rank], {"of": "all"}) if is_filled else (None, None)
    return {
        "own": ShardedObject("o/own", own, (4,), (rank,)),
        "all": ShardedObject("o/all", everyones, (1,), (0,), replica_id=rank),
    }


def save_and_load_all(rank: int, backend: tuple[str, int], scratch: Path) -> None:
    """Plainly and with little memory, in Megatron-Core's wrappers, and so that ranks share reads.

    The last two in groups of several sizes.
    """
    saver, loader = STRATEGIES[backend]
    groups = [dist.new_subgroups(size)[0] for size in (2, 4, 1)]
    wrapped = [FullyParallelSaveStrategyWrapper(saver(), group) for group in groups]
    savers = cycle([backend, saver(options=SMALL), *wrapped])
    entries = cycle(Entry)
    for number, (name, saved, wanted) in enumerate(layouts(backend)):
        # Megatron-Core's own checks divide by the length.
        entry = Entry.OURS if name == "empty" else next(entries)
        root, group = scratch / f"{name} {entry}", groups[number % 3]
        state: dict[str, Any] = state_of(rank, saved)
        save(entry, state | objects(rank, is_filled=True), root, sharded_strategy=next(savers))
        ways: list[Any] = [
            None,
            TwoStageDataParallelLoadShardedStrategy(group, max_inflight_bytes=20_000),
        ]
        if not name.startswith("random"):  # gloo exchanges tensors of few dtypes
            ways.append(FullyParallelLoadStrategyWrapper(loader(), group))
        for strategy in ways:
            asked = state_of(rank, wanted, (zeros, no_data)[number // 2 % 2])
            asked |= objects(rank, is_filled=False)
            with cpu_stand_ins():  # the wrapper moves what it exchanges to CUDA
                loaded = load(entry, asked, root, sharded_strategy=strategy, strict="raise_all")
            assert differences(rank, wanted, loaded) == [], (root, strategy)
            assert (loaded["own"], loaded["all"]) == ([rank], {"of": "all"}), (root, strategy)


@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_every_layout_dtype_and_key_comes_back_bit_for_bit_in_another_layout(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    require_on_ranks(4, save_and_load_all, backend, tmp_path)


# Smaller checks, all on the same four ranks, by either entry


def only_main_replicas_are_written(rank: int, entry: Entry, root: Path) -> None:
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
    assert differences(rank, [cut], load(entry, state_of(rank, [cut], no_data), root)) == []


def the_default_device_makes_no_difference(rank: int, entry: Entry, root: Path) -> None:
    """As after ``torch.set_default_device("cuda")``, which training scripts may call."""
    if entry is Entry.MEGATRON:
        return  # it makes tensors on that device itself
    cuts = [on_grid("w", (8, 4), (4, 2)), at_random("w.cut", (12, 10), 9)]
    state = state_of(rank, cuts)
    with torch.device("meta"):
        save(entry, state, root)
        loaded = load(entry, state_of(rank, cuts, no_data), root)
    assert differences(rank, cuts, loaded) == []


def conjugated(data: torch.Tensor) -> torch.Tensor:
    return data.conj().resolve_conj().conj()


def negative_view(data: torch.Tensor) -> torch.Tensor:
    """The values of ``data`` as the imaginary part of a conjugated tensor: a lazy negation."""
    return torch.complex(torch.zeros_like(data), -data).conj().imag


def in_a_graph(data: torch.Tensor) -> torch.Tensor:
    return Parameter(data) * 1


KINDS = {**LAYOUTS, "in a graph": in_a_graph, "negative": negative_view}


def tensors_of_any_memory_layout_are_saved_and_filled(rank: int, entry: Entry, root: Path) -> None:
    generator = torch.Generator().manual_seed(rank)
    real = torch.randn(6, 4, generator=generator)
    complex_ = torch.randn(6, 4, dtype=torch.complex64, generator=generator)
    tensors = {name: kind(real) for name, kind in KINDS.items()} | {
        "conjugated": conjugated(complex_),
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
    assert [n for n in cuts if not same_bits(tensors[n], expected[n])] == [], "changed by the save"
    targets: dict[str, Any] = {n: kind(torch.zeros(6, 4)) for n, kind in KINDS.items()}
    targets["conjugated"] = conjugated(torch.zeros(6, 4, dtype=torch.complex64))
    wanted = {n: sharded(cut, cut.parts[0], targets.get(n)) for n, cut in cuts.items()}
    loaded = load(entry, wanted, root)
    assert [n for n in cuts if not same_bits(loaded[n], expected[n])] == []
    assert [n for n, target in targets.items() if loaded[n] is not target] == []


def a_shard_may_be_wanted_twice_and_data_has_its_local_shape(
    rank: int, entry: Entry, root: Path
) -> None:
    cut = on_grid("w", (8, 4), (4, 1), dtype=torch.bfloat16)
    part, none = cut.parts[rank], sharded(cut, cut.parts[rank], None)
    save(entry, state_of(rank, [cut]), root)
    own, shared = torch.ones(2, 4, dtype=cut.dtype), torch.ones(2, 4, dtype=cut.dtype)
    wanted = {
        "none": [none, none],
        "own": [sharded(cut, part, own), sharded(cut, part, torch.ones_like(own))],
        "one memory": [sharded(cut, part, shared), sharded(cut, part, shared)],
    }
    loaded = load(entry, wanted, root, validate_access_integrity=False)
    assert none.data is None
    assert loaded["own"][0] is own
    for name, tensors in loaded.items():
        assert all(same_bits(tensor, part_of(cut, part)) for tensor in tensors), name
    replaced = sharded(cut, part, torch.ones(2, 4, dtype=cut.dtype))
    if rank == 1:
        replaced.data = torch.ones(4, 2, dtype=cut.dtype)
    said = "rank 1: w: its data has shape (4, 2), its local_shape is (2, 4)"
    require_refused(partial(load, entry, {"w": replaced}, root), PlanError, said)


def load_directly_on_device_fills_the_callers_data(rank: int, entry: Entry, root: Path) -> None:
    cut = on_grid("w", (8, 4), (4, 1), dtype=torch.bfloat16)
    save(entry, state_of(rank, [cut]), root, sharded_strategy=("zarr", 1))
    directly = TensorStoreLoadShardedStrategy(load_directly_on_device=True)
    loads = partial(load, entry, root=root, sharded_strategy=directly)
    assert differences(rank, [cut], loads(state_of(rank, [cut], zeros))) == []
    said = "w: load_directly_on_device needs a ShardedTensor"
    require_refused(partial(loads, state_of(rank, [cut], no_data)), StrategyError, said)


def a_vocabulary_that_grew_or_shrank_is_padded_or_clipped(
    rank: int, entry: Entry, root: Path
) -> None:
    """It grew so far that a rank has padding alone, too."""

    def vocabulary(rows: int) -> tuple[Cut, Part]:
        part = Part(rank, (rank * rows, 0), (rows, 4))
        return Cut("vocab", (4 * rows, 4), torch.float32, (part,), (4, 1)), part

    stored, own = vocabulary(3)
    data = part_of(stored, own)
    save(entry, {"w": sharded(stored, own, data, allow_shape_mismatch=True)}, root)
    assert same_bits(load(entry, {"w": sharded(stored, own, None)}, root)["w"], data)
    for per_rank in (1, 2, 3, 4, 5, 8, 16):
        cut, part = vocabulary(per_rank)
        padded = torch.zeros(max(4 * per_rank, 12), 4)
        padded[:12] = whole(stored)
        for target in (None, torch.ones(per_rank, 4)):
            wanted = {"w": sharded(cut, part, target, allow_shape_mismatch=True)}
            assert same_bits(load(entry, wanted, root)["w"], padded[part.slices()]), per_rank


BAD_KEYS = (
    *("x" * 256, "ü" * 128, "a/" + "x" * 300, "a/" + "x" * 300 + "/b", "\ud800"),
    *("", "/", "a//b", "/absolute", "trailing/", ".", "..", "../outside", "a/../b", "a/./b"),
    *("nul\0", "a\\b", "common.pt", "metadata.json", "metadata.json/w", "a/metadata.json/w"),
    *("optimizer/common.pt", ".zarray", "a/.zarray", "rng/shard_0_1.pt", "locked.__lock"),
    *("w.__lock/x", ".removed-w", "a/.removed-w", ".partial-w"),
)
BELOW_ANOTHER = ("0", "1.2", ".zarray", ".zattrs", ".zgroup", "0/deeper")
"""Files of an array, in which there can be no other."""


def keys_that_no_file_system_takes_are_refused_by_name(rank: int, entry: Entry, root: Path) -> None:
    if entry is Entry.MEGATRON:
        return  # the strategy says it, whoever has called it
    for number, key in enumerate(BAD_KEYS):
        state = state_of(rank, [on_grid(key, (8,), (4,))], zeros)
        bad = partial(save, entry, state, root / str(number), sharded_strategy=("zarr", 1))
        require_refused(bad, PlanError, f"key {key!r} cannot be stored", key=key)
    for below in BELOW_ANOTHER:
        cuts = [on_grid(key, (8,), (4,)) for key in ("a/b", f"a/b/{below}")]
        bad = partial(
            save, entry, state_of(rank, cuts), root / "below", sharded_strategy=("zarr", 1)
        )
        require_refused(bad, PlanError, "cannot be stored")
    assert not (root.parent / "outside").exists()
    assert not list(root.rglob("metadata.json"))


def shards_on_no_grid_are_refused_by_name(rank: int, entry: Entry, root: Path) -> None:
    """By format ("zarr", 1): it says which format holds them."""
    cuts = [
        *(cut for cut in irregular() if cut.key.startswith("buffer")),
        Cut(
            "end",
            (10,),
            torch.float32,
            tuple(Part(n, (3 * n,), (3 - 2 * (n > 2),)) for n in range(4)),
        ),
    ]
    for cut in cuts:
        bad = partial(save, entry, state_of(rank, [cut]), root, sharded_strategy=("zarr", 1))
        require_refused(bad, PlanError, cut.key, "('safetensors', 1)", key=cut.key)
    assert not list(root.glob("[!.]*/.zarray"))


def packs_hold_any_key_that_is_text(rank: int, entry: Entry, root: Path) -> None:
    """Keys are not files there."""
    keys = [*BAD_KEYS, *BELOW_ANOTHER, "w@0.0", "w@", "w#0", "__common__", "__digests__"]
    keys += ["__padding__", "__metadata__", '"', "\n", "\x7f", "a" * 10_000]
    no_text = [key for key in keys if key == "\ud800"]
    keys = [key for key in keys if key not in no_text]
    cuts = [on_grid(key, (8,), (4,)) for key in keys] + [on_grid("scalar@", (), ())]
    held = {key: ShardedObject(key, {"of": (key, rank)}, (4,), (rank,)) for key in keys}
    for number, state in enumerate((state_of(rank, cuts), held)):
        save(entry, dict(state), root / str(number), sharded_strategy=PACKS)
    assert differences(rank, cuts, load(entry, state_of(rank, cuts, no_data), root / "0")) == []
    asked = {key: ShardedObject(key, None, (4,), (rank,)) for key in keys}
    found = load(entry, asked, root / "1", strict="raise_all")
    assert {key: found[key] for key in keys} == {key: {"of": (key, rank)} for key in keys}
    for key in no_text:
        for state in ({"w": on_grid(key, (8,), (4,))}, {}):
            bad = state_of(rank, list(state.values()), zeros)
            bad |= {} if state else {"o": ShardedObject(key, 1, (4,), (rank,))}
            call = partial(save, entry, bad, root / "bad", sharded_strategy=PACKS)
            require_refused(call, PlanError, repr(key), key=key)
    assert not (root / "bad" / "index").exists()


@dataclass(slots=True)
class Norm:
    """Of the common state."""

    eps: float
    name: str


def common_state_that_differs_is_logged(rank: int, entry: Entry, root: Path) -> None:
    """With the path and both values, once."""
    if entry is Entry.MEGATRON:
        return  # it does so itself
    texts = logged(".sharded.checks")
    allow_torch_dist()
    is_odd = rank == 2
    args = Namespace(lr=0.2 if is_odd else 0.1, same={1}, t=torch.tensor([1.0, 3.0 - is_odd]))
    args.layers = [{"norm": Norm(1e-5 if is_odd else 1e-6, "x" * 9000 + str(rank))}]
    if is_odd:
        args.extra = {0: None}  # a key that is no text
    backends = [("zarr", 1), PACKS, ("torch_dist", 1)]
    for backend in backends:
        state = state_of(rank, [on_grid("w", (8,), (4,))]) | {"args": args}
        with cpu_stand_ins():
            save(entry, state, root / backend[0], sharded_strategy=backend, allow=[Norm])
    said = [text for text in texts if "common state dict differs" in text]
    assert len(said) == len(backends) * (rank == 0), texts
    for text in said:
        for words in (
            "args.lr: 0.1 on rank 0, 1, 3, 0.2 on rank 2",
            "args.t[1]: 3.0 on rank 0, 1, 3, 2.0 on rank 2",
            "args.layers[0].norm.eps: 1e-06 on rank 0, 1, 3, 1e-05 on rank 2",
            "args.extra[0]: nothing on rank 0, 1, 3, None on rank 2",
        ):
            assert words in text, text
        assert "same" not in text
        assert len(text) < 2000


CHECKS: tuple[Callable[[int, Entry, Path], None], ...] = (
    only_main_replicas_are_written,
    the_default_device_makes_no_difference,
    tensors_of_any_memory_layout_are_saved_and_filled,
    a_shard_may_be_wanted_twice_and_data_has_its_local_shape,
    load_directly_on_device_fills_the_callers_data,
    a_vocabulary_that_grew_or_shrank_is_padded_or_clipped,
    keys_that_no_file_system_takes_are_refused_by_name,
    shards_on_no_grid_are_refused_by_name,
    packs_hold_any_key_that_is_text,
    common_state_that_differs_is_logged,
)


def run_checks(rank: int, entry: Entry, scratch: Path) -> None:
    for check in CHECKS:
        check(rank, entry, scratch / check.__name__)


@pytest.mark.parametrize(
    ("entry", "backend"), [(Entry.OURS, PACKS), (Entry.MEGATRON, ("zarr", 1))], ids=str
)
def test_unusual_tensors_and_keys_are_saved_or_refused(
    entry: Entry, backend: tuple[str, int], tmp_path: Path
) -> None:
    require_on_ranks(4, run_checks, entry, tmp_path, default=backend)
