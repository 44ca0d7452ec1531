"""What this package's own ``save`` and ``load`` do beyond Megatron-Core's, and just as they do."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.validation import StrictHandling

import dist_ckpt_strategies
from dist_ckpt_strategies.config import LocalOptions
from dist_ckpt_strategies.errors import (
    DuplicateWriterError,
    StorageError,
    StrategyNotFoundError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from tests.support.entries import (
    Entry,
    Failure,
    load,
    outcome,
    prepare,
    save,
)
from tests.support.ranks import allow_torch_dist, run_processes
from tests.support.sharding import (
    Cut,
    Part,
    at_random,
    differences,
    no_data,
    on_grid,
    part_of,
    same_bits,
    state_of,
    whole,
    zeros,
)

pytestmark = pytest.mark.multiprocess


class Homemade:
    """A class of a user's own."""

    def __init__(self) -> None:
        self.value = 5


def cuts() -> list[Cut]:
    return [on_grid("w", (8, 4), (4, 2)), on_grid("b", (4,), (1,), num_replicas=4)]


def halves(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> dict[str, Any]:
    """Builds the two halves of a fused weight."""
    top, bottom = data.chunk(2)
    return {
        "top": ShardedTensor.from_rank_offsets(f"{key}.top", top, replica_id=replica_id),
        "bottom": ShardedTensor.from_rank_offsets(f"{key}.bottom", bottom, replica_id=replica_id),
    }


def joined(loaded: dict[str, Any]) -> torch.Tensor:
    return torch.cat([loaded["top"], loaded["bottom"]])


def everything(rank: int, *, empty: bool = False) -> dict[str, Any]:
    """One of each kind of value that a state dict holds, at several depths."""
    weight = torch.zeros(4, 2) if empty else torch.arange(8.0).reshape(4, 2) + rank
    return {
        "model": {
            "layers": [
                {"w": tensor}
                for tensor in state_of(rank, cuts(), zeros if empty else part_of).values()
            ],
            "fused": ShardedTensorFactory(f"fused.{rank}", weight, halves, joined),
            "extra": ShardedObject("extra/state", None if empty else {"rank": rank}, (4,), (rank,)),
        },
        "local": LocalNonpersistentObject(f"of rank {rank}" if empty else "not stored"),
        **({} if empty else {"iteration": 7, "args": {"lr": 0.1, "betas": (0.9, 0.95)}}),
    }


def load_everything(rank: int, entry: Entry, root: Path) -> list[str]:
    loaded = load(entry, everything(rank, empty=True), root)
    stored = everything(rank)
    checks = {
        "tensors": all(
            same_bits(found["w"], tensor["w"].data)
            for found, tensor in zip(
                loaded["model"]["layers"], stored["model"]["layers"], strict=True
            )
        ),
        "factory": torch.equal(loaded["model"]["fused"], stored["model"]["fused"].data),
        "object": loaded["model"]["extra"] == {"rank": rank},
        "local": loaded["local"] == f"of rank {rank}",
        "common": (loaded["iteration"], loaded["args"]) == (7, {"lr": 0.1, "betas": (0.9, 0.95)}),
        "content": loaded["content_metadata"] == {"format": 3},
    }
    return [what for what, is_right in checks.items() if not is_right]


def arguments_left_alone(rank: int, root: Path) -> list[str]:
    """What a save and a load have changed of the state dicts that they were given."""
    state, fresh, wanted = everything(rank), everything(rank), everything(rank, empty=True)
    factory = state["model"]["fused"]
    save(Entry.OURS, state, root, content_metadata={"format": 3})
    load(Entry.OURS, wanted, root)
    checks = {
        "keys": list(state) == list(fresh),
        "factory": isinstance(factory, ShardedTensorFactory),
        "common": state["args"] == fresh["args"],
        "local": isinstance(state["local"], LocalNonpersistentObject),
        "wanted": isinstance(wanted["local"], LocalNonpersistentObject),
        "wanted factory": isinstance(wanted["model"]["fused"], ShardedTensorFactory),
    }
    return [what for what, is_right in checks.items() if not is_right]


def save_and_load_everything(rank: int, scratch: Path) -> dict[str, Any]:
    """Each of the two entries loads what each of them saved; ours leaves the arguments alone."""
    prepare(60)
    found: dict[str, Any] = {"arguments": arguments_left_alone(rank, scratch / "arguments")}
    for saver in Entry:
        root = scratch / saver.value
        save(saver, everything(rank), root, content_metadata={"format": 3, "dp_cp_group": None})
        for loader in Entry:
            found[f"{saver} to {loader}"] = load_everything(rank, loader, root)
        found[f"{saver} content"] = dist_checkpointing.load_content_metadata(str(root))
    return found


def test_each_entry_loads_everything_that_either_saved_and_changes_no_argument(
    tmp_path: Path,
) -> None:
    for result in run_processes(4, save_and_load_everything, tmp_path):
        assert isinstance(result, dict), result
        for what, found in result.items():
            assert found == ({"format": 3} if "content" in what else []), result


def use_without_registering(rank: int, root: Path) -> Any:
    os.environ["DIST_CKPT_TIMEOUT_S"] = "30"
    dist_ckpt_strategies.save(state_of(rank, cuts()), root)
    loaded: Any = dist_ckpt_strategies.load(state_of(rank, cuts(), no_data), root)
    unknown = outcome(
        partial(dist_ckpt_strategies.save, state_of(rank, cuts()), root / "x", ("no.such", 3))
    )
    return differences(rank, cuts(), loaded), unknown


def test_nothing_has_to_be_registered_for_our_entries(tmp_path: Path) -> None:
    for wrong, unknown in run_processes(4, use_without_registering, tmp_path / "c"):
        assert wrong == []
        assert StrategyNotFoundError.__name__ in unknown.kinds
        assert unknown.is_megatrons
        assert "('no.such', 3)" in unknown.text or "'no.such', 3" in unknown.text
        assert "zarr" in unknown.text, "the message does not say what there is"


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelname, record.getMessage()))


def save_and_load_in_every_way(rank: int, root: Path) -> list[tuple[str, str]]:
    prepare(30, local=LocalOptions(replication_jump=1))
    records, logger = Records(), logging.getLogger("dist_ckpt_strategies")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(records)
    for name in (("zarr", 1), ("zarr", 2), ("local_replicated", 1)):
        place = root / f"{name[0]}{name[1]}"
        save(Entry.OURS, state_of(rank, cuts()), place, sharded_strategy=name)
        load(Entry.OURS, state_of(rank, cuts()), place)
    two_stage = TwoStageDataParallelLoadShardedStrategy(None)
    load(Entry.OURS, state_of(rank, cuts()), root / "zarr2", sharded_strategy=two_stage)
    dist_ckpt_strategies.save_async(state_of(rank, cuts()), root / "a").wait()
    return [one for one in records.found if one[1].startswith("rank ")]


def test_rank_0_reports_saves_and_loads_at_info_and_the_others_at_debug(tmp_path: Path) -> None:
    first, *others = run_processes(4, save_and_load_in_every_way, tmp_path)

    at_info = [text for level, text in first if level == "INFO"]
    for what, count in (("save to", 3), ("load from", 3), ("local save", 1), ("loaded", 1)):
        assert sum(what in text for text in at_info) == count, at_info
    assert len(at_info) == 8
    for found in others:
        assert {level for level, _ in found} == {"DEBUG"}
        assert len(found) >= len(at_info)


def registered_classes(rank: int, scratch: Path) -> dict[str, Any]:
    """A class in the common state and in an object, allowed in each of the ways there are."""
    prepare(60)
    state = {"mine": Homemade(), "o": ShardedObject("o", Homemade(), (4,), (rank,))}
    root = scratch / "c"
    wanted = {"o": ShardedObject("o", None, (4,), (rank,))}
    refused = {
        "refused at the save": outcome(partial(save, Entry.OURS, state, root)),
        "refused at the save of an object": outcome(
            partial(save, Entry.OURS, {"o": state["o"]}, root)
        ),
    }
    save(Entry.OURS, state, root, allow=[Homemade])
    seen = refused | {
        "refused": outcome(partial(load, Entry.OURS, wanted, root)),
        "by argument": outcome(partial(load, Entry.OURS, wanted, root, allow=[Homemade])),
        "refused again": outcome(partial(load, Entry.OURS, wanted, root)),
        "refused by strategies": outcome(
            partial(
                load,
                Entry.OURS,
                wanted,
                root,
                sharded_strategy=ZarrLoadShardedStrategy(allow=[Homemade]),
            )
        ),
        "by strategies": outcome(
            partial(
                load,
                Entry.OURS,
                wanted,
                root,
                sharded_strategy=ZarrLoadShardedStrategy(allow=[Homemade]),
                common_strategy=TorchCommonLoadStrategy(allow=[Homemade]),
            )
        ),
    }
    dist_ckpt_strategies.register(allow=[Homemade], replace=True)
    seen["registered"] = outcome(partial(load, Entry.OURS, wanted, root))
    dist_ckpt_strategies.register(allow=[Homemade], replace_common=True)
    seen["registered, through Megatron"] = outcome(partial(load, Entry.MEGATRON, wanted, root))
    return {name: describe(found) for name, found in seen.items()}


def describe(found: Any) -> Any:
    return found if isinstance(found, Failure) else (found["mine"].value, found["o"].value)


def test_a_class_is_allowed_by_argument_by_strategy_or_by_registration(tmp_path: Path) -> None:
    for result in run_processes(4, registered_classes, tmp_path):
        assert isinstance(result, dict), result
        for name, found in result.items():
            if "refused" in name:
                assert isinstance(found, Failure), name
                assert UnsafeObjectError.__name__ in found.kinds
                assert "test_entry.Homemade" in found.text
                assert "allow=" in found.text
            else:
                assert found == (5, 5), (name, found)


def ask_locally(rank: int, root: Path) -> Any:
    """Reading metadata and removing arrays are for one rank alone; the others do nothing."""
    prepare(60)
    state: dict[str, Any] = state_of(rank, [*cuts(), on_grid("w.old", (4,), (4,))])
    state["o"] = ShardedObject("w.object/of", rank, (4,), (rank,))
    save(Entry.OURS, state, root)
    seen = None
    if rank == 2:
        path = str(root)
        tensors = dist_checkpointing.load_tensors_metadata(path)
        sharded_ = load_sharded_metadata(path)
        common = dist_checkpointing.load_common_state_dict(path)
        dist_checkpointing.remove_sharded_tensors(path, "w.o")
        after = sorted(load_sharded_metadata(path))
        shapes = {key: (tensor.global_shape, tensor.dtype) for key, tensor in tensors.items()}
        seen = shapes, sorted(sharded_), common, after
    dist.barrier()
    plain = dist_checkpointing.load_plain_tensors(str(root))
    return seen, {
        key: same_bits(tensor, whole(cut))
        for cut in cuts()
        for key, tensor in plain.items()
        if key == cut.key
    }


def test_metadata_is_read_and_arrays_are_removed_by_one_rank_alone(tmp_path: Path) -> None:
    results = run_processes(4, ask_locally, tmp_path / "c")

    objects = [f"w.object/of/shard_{n}_4" for n in range(4)]
    shapes = {
        "w": ((8, 4), torch.float32),
        "b": ((4,), torch.float32),
        "w.old": ((4,), torch.float32),
    }
    assert results[2][0] == (shapes, sorted(["b", "w", "w.old", *objects]), {}, ["b", "w"])
    for _, plain in results:
        assert plain == {"w": True, "b": True}


def save_in_groups(rank: int, scratch: Path) -> dict[str, Any]:
    """Two halves of the world save a checkpoint each, at the same time; ranks keep their names."""
    prepare(60)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, within = divmod(rank, 2)
    saver = ZarrSaveShardedStrategy(group=groups[half])
    loader = ZarrLoadShardedStrategy(group=groups[half])
    cut = at_random(f"half.{half}", (12, 10), 7, size=2)
    root = scratch / f"half.{half}"
    if within == 0:
        root.mkdir()
    dist.barrier()
    saver.save(state_of(within, [cut]), root)
    loaded = loader.load(state_of(within, [cut], no_data), root)
    seen: dict[str, Any] = {"wrong": differences(within, [cut], loaded)}
    bad = Cut("twice", (4,), torch.float32, (Part(0, (0,), (4,)), Part(1, (0,), (4,))))
    seen["overlap"] = outcome(partial(saver.save, state_of(within, [bad]), root))
    blocked = {"o": ShardedObject("o", (lambda: 1) if rank == 3 else 1, (2,), (within,))}
    elsewhere = scratch / f"objects.{half}"
    elsewhere.mkdir(exist_ok=True)
    seen["object"] = outcome(partial(saver.save, blocked, elsewhere))
    return seen


def test_groups_save_on_their_own_and_errors_name_global_ranks(tmp_path: Path) -> None:
    results = run_processes(4, save_in_groups, tmp_path)

    for rank, result in enumerate(results):
        assert isinstance(result, dict), result
        assert result["wrong"] == []
        assert DuplicateWriterError.__name__ in result["overlap"].kinds
        low, high = (0, 1) if rank < 2 else (2, 3)
        assert f"on rank {low} " in result["overlap"].text, result["overlap"]
        assert f"on rank {high} " in result["overlap"].text
        if rank < 2:
            assert result["object"] is None
    for rank in (2, 3):
        failure = results[rank]["object"]
        assert StorageError.__name__ in failure.kinds
        assert failure.text.startswith("rank 3: "), failure


def use_torch_dist(rank: int, scratch: Path) -> dict[str, Any]:
    from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins  # noqa: PLC0415

    allow_torch_dist()
    prepare(60)
    choice = {"sharded_strategy": ("torch_dist", 1), "content_metadata": {"format": 3}}
    found: dict[str, Any] = {}
    # torch_dist synchronises CUDA and asks for its current device, also for tensors on the CPU.
    with cpu_stand_ins():
        for saver in Entry:
            root = scratch / saver.value
            save(saver, everything(rank), root, **choice)
            dist.barrier()
            found[f"{saver} files"] = sorted(path.name for path in root.iterdir())
            found[f"{saver} marker"] = (root / "metadata.json").read_text()
            for loader in Entry:
                found[f"{saver} to {loader}"] = load_everything(rank, loader, root)
        root = scratch / Entry.OURS.value
        found["refused"] = outcome(partial(save, Entry.OURS, everything(rank), root, **choice))
        save(Entry.OURS, everything(rank), root, overwrite=True, content_metadata={"format": 3})
        dist.barrier()
        found["zarr in its place"] = load_everything(rank, Entry.MEGATRON, root)
        found["files of torch_dist"] = [path.name for path in root.glob("*.distcp")]
    return found


def test_torch_dist_through_our_entries_is_torch_dist(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="without it torch_dist of Megatron-Core 0.16.1 hangs")

    for result in run_processes(4, use_torch_dist, tmp_path, timeout_s=120):
        assert isinstance(result, dict), result
        assert result["ours files"] == result["megatron files"]
        assert result["ours marker"] == result["megatron marker"]
        assert "CheckpointExistsError" in result["refused"].kinds
        assert result["files of torch_dist"] == []
        for what in ("megatron to ours", "ours to megatron", "ours to ours", "zarr in its place"):
            assert result[what] == [], (what, result)


def save_apart(rank: int, scratch: Path) -> Any:
    """The ranks have a directory each, under the same name as far as they can tell."""
    prepare(10)
    root = scratch / f"node{rank // 2}" / "c"
    root.mkdir(parents=True, exist_ok=True)
    return outcome(partial(save, Entry.OURS, state_of(rank, cuts()), root))


def test_ranks_that_do_not_share_a_directory_raise(tmp_path: Path) -> None:
    for rank, failure in enumerate(run_processes(4, save_apart, tmp_path)):
        assert isinstance(failure, Failure), (rank, failure)
        assert StorageError.__name__ in failure.kinds
        assert failure.global_rank in {2, 3}
        assert "the files of rank 0 are not visible here" in failure.text
        assert failure.path == str(tmp_path / "node1" / "c")
    assert not list(tmp_path.rglob("metadata.json"))
    assert all(".partial-" in str(path) for path in tmp_path.rglob(".zarray"))


def same_key(rank: int, scratch: Path) -> dict[str, Any]:
    """An array and an object under one key; keys that only one side has, and ``strict``."""
    prepare(60)
    seen: dict[str, Any] = {}
    for entry in Entry:
        # Megatron-Core's own check takes all values of a key for arrays, or all for objects.
        options = {"validate_access_integrity": entry is Entry.OURS}
        root = scratch / entry
        cut = on_grid("w", (8, 4), (4, 1))
        both: dict[str, Any] = state_of(rank, [cut])
        both["o"] = ShardedObject("w", {"of": rank}, (4,), (rank,))
        save(entry, both, root, **options)
        wanted: dict[str, Any] = state_of(rank, [cut], no_data)
        wanted["o"] = ShardedObject("w", None, (4,), (rank,))
        for strict in StrictHandling:
            loaded = load(entry, dict(wanted), root, strict=strict, **options)
            loaded = loaded[0] if isinstance(loaded, tuple) else loaded
            seen[f"{entry}, {strict}"] = differences(rank, [cut], loaded), loaded["o"]
    if rank == 2:
        wanted["new"] = ShardedObject("new", None, (1,), (0,))
    for strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL):
        options = {"strict": strict, "validate_access_integrity": rank < 0}
        seen[f"raised, {strict}"] = outcome(partial(load, Entry.OURS, wanted, root, **options))
    return seen


def test_an_array_and_an_object_may_have_one_key_and_strict_names_the_key_that_is_not_there(
    tmp_path: Path,
) -> None:
    for rank, result in enumerate(run_processes(4, same_key, tmp_path)):
        assert isinstance(result, dict), result
        for name, found in result.items():
            if name.startswith("raised"):
                assert isinstance(found, Failure), (name, found)
                assert (found.is_ours, found.is_megatrons) == (True, True), (rank, name, found)
                assert (found.key, found.global_rank) == ("new", 2), (rank, name, found)
            else:
                assert found == ([], {"of": rank}), name
