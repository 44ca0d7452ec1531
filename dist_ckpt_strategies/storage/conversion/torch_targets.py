"""Conversions to torch_dist and to safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.plan.convert import SAFETENSORS_DTYPES, ConvertPlan
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.conversion import Unit
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.conversion.journal import Record
from dist_ckpt_strategies.storage.conversion.safetensors_source import INDEX_NAME
from dist_ckpt_strategies.storage.conversion.targets import (
    Contents,
    Flush,
    Memory,
    ReadBox,
    has_size,
    key_of,
    new_file,
    read_part,
)
from dist_ckpt_strategies.storage.conversion.tensor_archive import write_tensor_archive
from dist_ckpt_strategies.storage.conversion.torch_dist import METADATA_NAME, Stretch, index_content
from dist_ckpt_strategies.storage.conversion.zarr_targets import write_common
from dist_ckpt_strategies.storage.disk.files import file_errors, write_file
from dist_ckpt_strategies.storage.disk.writeback import begin_writeback
from dist_ckpt_strategies.storage.objects.pickled import Allowed, dump_object, load_content
from dist_ckpt_strategies.storage.raw_chunks import write_buffered

_ALIGNED_NBYTES = 8


class TorchDistConversion:
    """Writes torch_dist, as torch.distributed.checkpoint and Megatron-Core read it; see Target.

    A piece of an array is held whole while it is written; the plan bounds pieces.

    Args:
        root: the directory, which exists.
        flush: how files become durable.
        allow: classes that objects may be unpickled to: here each goes into a list.
    """

    marker = CheckpointMarker("torch_dist", 1)

    def __init__(self, root: Path, flush: Flush, allow: Allowed) -> None:
        self._root = root
        self._flush = flush
        self._allow = allow
        self._memory = Memory()

    def begin(self, plan: ConvertPlan) -> None:
        """See Target. Arrays are described in the end."""

    def write(self, unit: Unit, read: ReadBox) -> Record:
        """See Target."""
        ends: list[int] = []
        path = f"{self._root}/{unit.name}"
        with new_file(path, key_of(unit), is_flushed=self._flush.is_each) as handle:
            for part in unit.parts:
                elements = read_part(part, part.region, read, self._memory)
                start = ends[-1] if ends else 0
                end = write_tensor_archive(handle, start, elements, part.array.dtype)
                begin_writeback(handle, start, end - start)
                ends.append(end)
        return {"ends": ends}

    def is_there(self, unit: Unit, record: Record) -> bool:
        """See Target."""
        return has_size(f"{self._root}/{unit.name}", record["ends"][-1])

    def finish(self, plan: ConvertPlan, records: Mapping[int, Record], contents: Contents) -> None:
        """See Target."""
        name = f"__0_{len(plan.units)}.distcp"
        objects = list(self._write_objects(name, contents.objects))
        write_common(self._root, contents.common)
        path = self._root / METADATA_NAME
        with file_errors(None, path):
            write_file(path, index_content(_pieces(plan, records), objects))

    def _write_objects(
        self, name: str, objects: Iterable[tuple[ObjectId, bytes]]
    ) -> Iterator[tuple[str, Stretch]]:
        path = f"{self._root}/{name}"
        byte_offset = 0
        with new_file(path, None, is_flushed=True) as handle:
            for object_id, content in objects:
                key = object_id.unique_key
                dumped = dump_object([load_content(content, path, key, self._allow)], name=key)
                write_buffered(handle, np.frombuffer(dumped, np.uint8))
                yield key, Stretch(name, byte_offset, len(dumped))
                byte_offset += len(dumped)


def _pieces(
    plan: ConvertPlan, records: Mapping[int, Record]
) -> Iterator[tuple[ArraySpec, Region, Stretch]]:
    for number, unit in enumerate(plan.units):
        ends = records[number]["ends"]
        for part, start, end in zip(unit.parts, [0, *ends[:-1]], ends, strict=True):
            yield part.array, part.region, Stretch(unit.name, start, end - start)


class SafetensorsConversion:
    """Writes files of safetensors and their index; see Target.

    Args:
        root: the directory, which exists.
        flush: how files become durable.
    """

    marker = None

    def __init__(self, root: Path, flush: Flush) -> None:
        self._root = root
        self._flush = flush
        self._memory = Memory()
        self._starts: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._made: set[str] = set()

    def begin(self, plan: ConvertPlan) -> None:
        """See Target. Every file gets its header, and its size."""
        tensors: dict[str, dict[str, Any]] = {unit.name: {} for unit in plan.units}
        nbytes = dict.fromkeys(tensors, 0)
        for unit in plan.units:
            for part in unit.parts:
                entry = tensors[unit.name].setdefault(
                    part.array.key,
                    {
                        "dtype": SAFETENSORS_DTYPES[part.array.dtype],
                        "shape": part.array.shape,
                        "data_offsets": [part.byte_offset, part.byte_offset],
                    },
                )
                entry["data_offsets"][1] = nbytes[unit.name] = part.byte_offset + part.nbytes
        for name, found in tensors.items():
            header = _header(found)
            self._starts[name] = len(header)
            self._sizes[name] = len(header) + nbytes[name]
            self._prepare(name, header)

    def _prepare(self, name: str, header: bytes) -> None:
        path = f"{self._root}/{name}"
        with file_errors(None, path):
            if not has_size(path, self._sizes[name]):
                self._made.add(name)  # whatever earlier runs have put there is gone
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(handle, header, 0)
                os.ftruncate(handle, self._sizes[name])
                os.fsync(handle)
            finally:
                os.close(handle)

    def write(self, unit: Unit, read: ReadBox) -> Record:
        """See Target."""
        path = f"{self._root}/{unit.name}"
        with file_errors(key_of(unit), path), open(path, "r+b", 0) as file:  # noqa: PTH123
            for part in unit.parts:
                if part.nbytes:
                    elements = read_part(part, part.region, read, self._memory)
                    at = self._starts[unit.name] + part.byte_offset
                    _write_at(file.fileno(), elements.reshape(-1).view(np.uint8), at)
            if self._flush.is_each:
                os.fsync(file.fileno())
            else:
                begin_writeback(file.fileno())
        return {}

    def is_there(self, unit: Unit, record: Record) -> bool:  # noqa: ARG002
        """See Target."""
        return unit.name not in self._made

    def finish(
        self,
        plan: ConvertPlan,
        records: Mapping[int, Record],  # noqa: ARG002
        contents: Contents,  # noqa: ARG002
    ) -> None:
        """See Target. The index comes last: it makes the files a model."""
        weights = {part.array.key: unit.name for unit in plan.units for part in unit.parts}
        index = {
            "metadata": {"total_size": plan.nbytes},
            "weight_map": {key: weights[key] for key in sorted(weights)},
        }
        path = self._root / INDEX_NAME
        with file_errors(None, path):
            write_file(path, json.dumps(index, indent=2).encode())


def _header(tensors: Mapping[str, Any]) -> bytes:
    """The beginning of a file: the size of the description, and the description."""
    fields = {"__metadata__": {"format": "pt"}, **tensors}
    content = json.dumps(fields, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNED_NBYTES)
    return len(content).to_bytes(8, "little") + content


def _write_at(handle: int, content: Any, byte_offset: int) -> None:
    done = 0
    while done < content.size:
        done += os.pwrite(handle, content[done:].data, byte_offset + done)
