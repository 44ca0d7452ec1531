"""Where the bytes of parts come from and go to: tensors, and files."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from dist_ckpt_strategies.comm.base import Bytes
from dist_ckpt_strategies.core.messages import Message
from dist_ckpt_strategies.device import (
    as_bytes,
    host_memory,
    is_in_order,
    settle,
    to_host,
    torch_dtype,
)
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageTimeoutError,
    as_checkpoint_error,
)
from dist_ckpt_strategies.local.part_files import PartReader, PartWriter
from dist_ckpt_strategies.local.part_format import (
    BufferSpec,
    Part,
    PartLayout,
    encode_description,
    encode_header,
    part_layout,
)
from dist_ckpt_strategies.storage.io_pool import run_with_limit


class TensorSource:
    """The bytes of a part whose tensors are at hand. Threads may share it.

    What lies in order on the host is taken from where it is. The rest is copied message by
    message; of tensors that are not in order, each reading thread holds one whole copy at a time.

    Args:
        part: describes the tensors.
        payloads: the elements of its buffers; they must not change while they are read. What the
            current streams of their devices have still to do to them is waited for.
    """

    def __init__(self, part: Part, payloads: Sequence[torch.Tensor]) -> None:
        settle(payloads)  # here, since other threads have other current streams
        self.part = part
        self.layout = part_layout(part)
        self._payloads = tuple(payloads)
        self._ordered: tuple[int, torch.Tensor] | None = None

    def content(self, message: Message) -> Bytes:
        """The bytes of a message, on the host."""
        hosts = to_host(
            [self._bytes(s.buffer)[s.start : s.start + s.nbytes] for s in message.slices]
        )
        if len(hosts) == 1:
            return hosts[0]
        content = np.zeros(message.nbytes, np.uint8)
        for piece, host in zip(message.slices, hosts, strict=True):
            start = self.layout.byte_offsets[piece.buffer] + piece.start - message.byte_offset
            content[start : start + piece.nbytes] = host
        return content

    def header(self) -> bytes:
        """The description with the digests of the tensors as they are; reads all of them."""
        digests = [
            xxhash.xxh3_64_intdigest(to_host([self._bytes(number)])[0].data)
            for number in range(len(self._payloads))
        ]
        return encode_description(self.part, digests)

    def _bytes(self, buffer: int) -> torch.Tensor:
        """The bytes of a buffer in order, wherever it is; the last copy made for that is kept."""
        tensor = self._payloads[buffer].detach()
        if is_in_order(tensor):
            return as_bytes(tensor)
        kept = self._ordered  # taken once: other threads read other buffers
        if kept is None or kept[0] != buffer:
            kept = self._ordered = (buffer, tensor.resolve_conj().resolve_neg().contiguous())
        return as_bytes(kept[1])


class BufferDigests:
    """The digests of a part's buffers, taken while its messages pass.

    Threads may share it, as long as the messages of one buffer pass in order.

    Args:
        part: the part.
        layout: where its buffers are in its file.
    """

    def __init__(self, part: Part, layout: PartLayout) -> None:
        self._num_buffers = len(part.buffers)
        self._byte_offsets = layout.byte_offsets
        self._digests: dict[int, Any] = {}

    def take(self, message: Message, content: Bytes) -> None:
        """A message passes."""
        for piece in message.slices:
            start = self._byte_offsets[piece.buffer] + piece.start - message.byte_offset
            digest = self._digests.setdefault(piece.buffer, xxhash.xxh3_64())
            digest.update(content[start : start + piece.nbytes].data)

    def values(self) -> list[int]:
        """The digest of every buffer, once all has passed."""
        nothing = xxhash.xxh3_64()
        return [self._digests.get(n, nothing).intdigest() for n in range(self._num_buffers)]


class FileSource:
    """A copy of a part in a file, that other ranks may get. Threads may share it.

    Attributes:
        header: its description, digests and all; None if it cannot be used.
        failure: what is wrong with it, once that is known.
        read_nbytes: bytes read from storage so far.
    """

    def __init__(self, part_id: str, path: Path | None) -> None:
        self._name = str(path or part_id)
        self.header: bytes | None = None
        self.failure: CheckpointError | None = None
        self.read_nbytes = 0
        self._counting = threading.Lock()
        self._reader: PartReader | None = None
        try:
            if path is None:
                raise CorruptCheckpointError(f"{part_id}: this rank has no copy of it")
            self._reader = run_with_limit(partial(PartReader, path), path)
            self.header = self._reader.header
        except StorageTimeoutError:
            raise
        except CheckpointError as error:
            self.failure = error

    def __str__(self) -> str:
        """The file."""
        return self._name

    def read_into(self, message: Message, target: Bytes) -> None:
        """Fill ``target`` with a message; with zeros once something is wrong."""
        try:
            if self.failure is None and self._reader is not None:
                self._reader.read(message.byte_offset, target)
                with self._counting:
                    self.read_nbytes += target.size
                return
        except Exception as error:  # noqa: BLE001 - told to all ranks, which use another copy
            self.failure = as_checkpoint_error(error)
        target[:] = 0

    def close(self) -> None:
        """Let go of the file."""
        if self._reader is not None:
            self._reader.close()


class MemorySource:
    """A copy in this process; see FileSource."""

    def __init__(self, part: Part, payloads: Sequence[torch.Tensor]) -> None:
        self._tensors = TensorSource(part, payloads)
        self.header: bytes | None = self._tensors.header()
        self.failure: CheckpointError | None = None
        self.read_nbytes = 0

    def read_into(self, message: Message, target: Bytes) -> None:
        """See FileSource."""
        target[:] = self._tensors.content(message)

    def close(self) -> None:
        """See FileSource."""


PartSource = FileSource | MemorySource
"""A copy of a part that other ranks may get."""


class PartSink(Protocol):
    """What becomes of a part whose bytes arrive message by message."""

    def memory(self, message: Message) -> Bytes | None:
        """Where the message is to land; None if anywhere will do, for all of them or for none."""
        ...

    def take(self, message: Message, content: Bytes) -> None:
        """Store a message that has landed. Called in the order of the file.

        Raises:
            StorageError: it cannot be stored.
        """
        ...

    def finish(self, digests: Sequence[int]) -> None:
        """All is there, and has these digests.

        Raises:
            StorageError: it cannot be made to last.
        """
        ...

    def abandon(self) -> None:
        """Leave nothing behind, finished or not.

        Raises:
            StorageError: something cannot be removed.
        """
        ...


class FileSink:
    """Writes a part; see PartSink."""

    def __init__(self, part: Part, writer: PartWriter) -> None:
        self._part = part
        self._writer = writer

    def __str__(self) -> str:
        """The file."""
        return str(self._writer)

    def memory(self, message: Message) -> Bytes | None:  # noqa: ARG002 - any memory will do
        """See PartSink."""
        return None

    def take(self, message: Message, content: Bytes) -> None:
        """See PartSink."""
        self._writer.write(message.byte_offset, content)

    def finish(self, digests: Sequence[int]) -> None:
        """See PartSink."""
        self._writer.finish(encode_header(self._part, digests))

    def abandon(self) -> None:
        """See PartSink."""
        self._writer.abandon()


class MemorySink:
    """Fills new tensors on the host, which share one piece of memory; see PartSink.

    New memory comes in large pages where the system has them: it is touched for the first time.

    Attributes:
        part: what they are.
        tensors: one for each buffer.
    """

    def __init__(self, part: Part, layout: PartLayout) -> None:
        self.part = part
        self._layout = layout
        self._memory = host_memory(layout.nbytes - layout.header_nbytes, is_pinned=False)
        self.tensors = tuple(map(self._tensor, part.buffers, layout.byte_offsets))

    def memory(self, message: Message) -> Bytes | None:
        """See PartSink."""
        return self.place(message)

    def place(self, message: Message) -> Bytes:
        """Where a message belongs; the memory is laid out like the file."""
        start = message.byte_offset - self._layout.header_nbytes
        content: Bytes = self._memory[start : start + message.nbytes].numpy()
        return content

    def take(self, message: Message, content: Bytes) -> None:
        """See PartSink."""

    def finish(self, digests: Sequence[int]) -> None:
        """See PartSink."""

    def abandon(self) -> None:
        """See PartSink."""

    def _tensor(self, buffer: BufferSpec, byte_offset: int) -> torch.Tensor:
        """A tensor with a storage of its own, lest saving it should save its neighbours too."""
        if buffer.nbytes == 0:
            return torch.empty(buffer.shape, dtype=torch_dtype(buffer.dtype), device="cpu")
        start = byte_offset - self._layout.header_nbytes
        content = torch.from_numpy(self._memory.numpy()[start : start + buffer.nbytes])
        return content.view(torch_dtype(buffer.dtype)).reshape(buffer.shape)
