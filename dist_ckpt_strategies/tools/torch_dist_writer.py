"""Write a converted checkpoint as torch_dist.

Source: torch.distributed.checkpoint; Megatron-Core 0.16.1.
"""

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dist_ckpt_strategies.device import as_tensor, torch_dtype
from dist_ckpt_strategies.formats.objects import dump_loadable, load_content
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    file_errors,
    new_file,
    write_buffered,
)
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint
from dist_ckpt_strategies.tools.plan_convert import FileTask
from dist_ckpt_strategies.tools.torch_dist import METADATA_NAME
from dist_ckpt_strategies.tools.writers import Read, StagedWriter


class TorchDistWriter(StagedWriter):
    """Writes torch_dist; see TargetWriter. A shard larger than a block is cut.

    Objects are unpickled, because each goes into a list.
    """

    def write(self, task: FileTask, read: Read) -> list[list[Any]]:
        """See TargetWriter. Gives item, offset, shape and end in the file of each shard."""
        shards: list[list[Any]] = []
        path = self.files.path(task.name)
        with (
            file_errors(task.key, path),
            new_file(path) as handle,
            open(handle, "wb", closefd=False) as file,
        ):
            for number, item in enumerate(task.items):
                for block in item.blocks(self._block_nbytes):
                    torch.save(as_tensor(self._block(item, block, read), item.array.dtype), file)
                    shards.append([number, block.offset, block.shape, file.tell()])
        return shards

    def finish(self, records: Mapping[int, Any], source: OpenedCheckpoint, common: bytes) -> None:
        """See TargetWriter."""
        arrays = {
            array.key: TensorStorageMetadata(
                TensorProperties(dtype=torch_dtype(array.dtype)), torch.Size(array.shape), []
            )
            for array in self.plan.arrays
        }
        metadata = Metadata({**arrays}, storage_data={})
        for number, shards in sorted(records.items()):
            task, start = self.plan.tasks[number], 0
            for item, offset, shape, end in shards:
                key = task.items[item].array.key
                chunks = arrays[key].chunks
                chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
                index = MetadataIndex(key, torch.Size(offset), len(chunks) - 1)
                metadata.storage_data[index] = _StorageInfo(task.name, start, end - start)
                start = end
        self._write_objects(source, metadata)
        self.files.write(COMMON_NAME, common)
        self.files.write(METADATA_NAME, pickle.dumps(metadata))

    def _write_objects(self, source: OpenedCheckpoint, metadata: Metadata) -> None:
        name = f"__0_{len(self.plan.tasks)}.distcp"
        path, byte_offset = self.files.path(name), 0
        with file_errors(None, path), new_file(path) as handle:
            for object_id in self.plan.objects:
                key, content = object_id.unique_key, source.object_content(object_id)
                value = load_content(content, path, key, self._allow)
                dumped = dump_loadable([value], name=key, allow=self._allow)
                write_buffered(handle, np.frombuffer(dumped, np.uint8))
                metadata.state_dict_metadata[key] = BytesStorageMetadata()
                info = _StorageInfo(name, byte_offset, len(dumped))
                metadata.storage_data[MetadataIndex(key)] = info
                byte_offset += len(dumped)
