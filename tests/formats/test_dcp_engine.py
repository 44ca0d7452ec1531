"""torch.distributed.checkpoint stores packs by ``lay_out``, ``write_pack`` and ``commit`` alone.

Nothing of this package talks to peers: what ranks have to tell each other goes through DCP's own
plans and results. Names and layouts are made by the rank that writes.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import DType, ObjectId, Region, ShardId, ShardSpec
from dist_ckpt_strategies.core.coverage import require_coverage
from dist_ckpt_strategies.formats.index import array_segments
from dist_ckpt_strategies.formats.pack import lay_out
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.formats.pack_commit import commit, new_save_id
from dist_ckpt_strategies.formats.pack_summary import PackSummary, build_save, joined_tables
from dist_ckpt_strategies.formats.pack_write import write_each, write_pack
from dist_ckpt_strategies.storage.files import Directory
from dist_ckpt_strategies.storage.io_pool import Deadline
from dist_ckpt_strategies.storage.store import ArrayRead
from tests.support.ranks import done_by

pytestmark = pytest.mark.multiprocess


def bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class PackWriter(StorageWriter):
    """Each rank writes packs of its own; the coordinator makes them visible."""

    def __init__(self, root: Path) -> None:
        self.place, self.was_cached = Directory(root), False

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.was_cached = not plan.usable
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shards, tensors, objects = [], [], []
        for item in plan.items:
            key = item.index.fqn
            data: Any = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                objects.append((ObjectId(key, (), ()), np.frombuffer(data.getvalue(), np.uint8)))
                continue
            stored: Any = item.tensor_data
            region = Region(tuple(stored.chunk.offsets), tuple(stored.chunk.sizes))
            dtype = DType.named(str(stored.properties.dtype), key=key)
            shards.append(ShardSpec(ShardId(key, region), tuple(stored.size), dtype))
            tensors.append(bytes_of(data))
        contents, rank = [*tensors, *(content for _, content in objects)], dist.get_rank()
        layout = lay_out(shards, [(name, content.size) for name, content in objects], rank=rank)

        def write(name: str, number: int) -> Any:
            pack = layout.packs[number]
            batch = [contents[source] for source in pack.sources if source >= 0]
            return write_pack(self.place, name, pack, [batch], save_id="", rank=rank)

        records = write_each(self.place, len(layout.packs), write, 2, Deadline.after(60))
        summary = PackSummary.of(layout, records), layout.table
        return done([WriteResult(MetadataIndex(""), 0, summary)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        summaries, tables = zip(*(of_rank[0].storage_data for of_rank in results), strict=True)
        table, ranks, differing = joined_tables(tables, [len(s.packs) for s in summaries])
        assert not differing
        require_coverage(table, ranks)
        segments = array_segments(table)
        commit(self.place, build_save(new_save_id(self.place), segments, summaries, {}))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return True


class PackReader(StorageReader):
    """Each rank reads and verifies what it needs."""

    def __init__(self, root: Path) -> None:
        self.packs = PackCheckpoint(root, Options())

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, Any] = {o.key: BytesStorageMetadata() for o in self.packs.object_ids()}
        for key in self.packs.keys():
            table = self.packs.index.find([key])
            chunks = [
                ChunkStorageMetadata(torch.Size(region.offset), torch.Size(region.shape))
                for region in map(table.region, range(len(table)))
            ]
            dtype = getattr(torch, table.facts[0].dtype)
            size = torch.Size(table.facts[0].shape)
            found[key] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
        return Metadata(found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return LoadPlan(plan.items, self.packs.identity, plan.planner_data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        assert len({plan.storage_data for plan in plans}) == 1
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        specs = self.packs.find(
            item.storage_index.fqn for item in plan.items if item.type is LoadItemType.TENSOR
        )
        reads, targets = [], []
        for item in plan.items:
            key, origin = item.storage_index.fqn, item.storage_index.offset or ()
            if item.type is LoadItemType.BYTE_IO:
                stored = self.packs.object_content(ObjectId(key, (), ()))
                planner.load_bytes(item, io.BytesIO(stored))
                continue
            start = map(sum, zip(origin, item.storage_offsets, strict=True))
            target = planner.resolve_tensor(item).detach()
            memory = np.empty(tuple(item.lengths), specs[key].dtype.numpy)
            reads.append(ArrayRead(specs[key], Region(tuple(start), tuple(item.lengths)), memory))
            targets.append((item, target, memory))
        self.packs.begin_reads(reads).wait()
        for item, target, memory in targets:
            content = torch.from_numpy(memory.reshape(-1).view(np.uint8))
            target.copy_(content.view(target.dtype).reshape(target.shape))
            planner.commit_tensor(item, target)
        return done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return True


def state_after(steps: int, seed: int) -> tuple[dict[str, Any], torch.nn.Module, Any]:
    """The state of a model that FSDP2 has sharded, unevenly, and that has been trained."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * (seed + 1)
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    extra = {"scale": torch.arange(5).bfloat16() * seed, "note": f"seed {seed}", "step": steps}
    return {"model": weights, "optimizer": moments, "extra": extra}, model, optimizer


def whole(value: Any) -> Any:
    """The same without sharding, as what compares equal only where every bit does."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bytes_of(value).tobytes()
    return value


def save_twice(rank: int, root: Path) -> Any:
    for seed in (1, 2):
        state, *_ = state_after(2, seed)
        writer = PackWriter(root)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp_save(state, storage_writer=writer, planner=planner)
        assert writer.was_cached == (seed == 2)
    return whole(state)


def load(rank: int, root: Path) -> Any:
    state, model, optimizer = state_after(1, 7)
    dcp_load(state, storage_reader=PackReader(root))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert whole(model.state_dict()) == whole(state["model"])
    return whole(state)


def load_damaged(rank: int, root: Path) -> str:
    with pytest.raises(CheckpointException) as failure:
        load(rank, root)
    return "\n".join(str(error[0]) for error in failure.value.failures.values())


@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2), (4, 4)])
def test_fsdp2_state_is_saved_twice_and_loaded_by_other_ranks(
    saving: int, loading: int, tmp_path: Path
) -> None:
    saved = done_by(saving, save_twice, tmp_path)[0]

    packs = list(tmp_path.glob("packs/*/*"))
    assert len(packs) == saving, "the packs of the first save are gone"
    assert done_by(loading, load, tmp_path) == [saved] * loading

    content = bytearray(packs[0].read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the first byte of the first block
    packs[0].write_bytes(content)
    for text in done_by(loading, load_damaged, tmp_path):
        assert "is damaged: bytes" in text
        assert str(packs[0]) in text
