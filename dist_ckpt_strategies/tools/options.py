"""Options of the tools that read a checkpoint: threads, and bounds on memory and files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt_strategies.config import Options, Verify, options_from_environment
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.locations import Location, located
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint, open_at

_MAX_THREADS = 8
_BUFFERS = 4
"""Blocks that a thread holds at the same time, at most: read, assembled, encoded, flushed."""

_LEAST_BLOCK_NBYTES = 64 << 10
_LARGEST_BLOCK_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of a conversion or comparison.

    Attributes:
        max_memory_bytes: bound on the elements in memory at once, over all threads; by default
            ``max_inflight_bytes`` of the options. On top come objects, the libraries, and one shard
            for each thread where the source is torch_dist.
        max_file_bytes: wanted size of the files of safetensors, 5 GB by default, and of packs and
            files of torch_dist, 512 MiB; an array of safetensors, or a shard, that is larger has a
            file of its own.
        num_threads: files handled at the same time; by default one for each core, at least 2.
        options: timeouts. Whatever ``verify`` is, all that is read is verified, or a copy would
            have valid digests of damaged elements. Only packs may be made of what was read with
            ``verify="off"``: they say so, in their feature ``unverified``.
    """

    max_memory_bytes: int | None = None
    max_file_bytes: int | None = None
    num_threads: int | None = None
    options: Options | None = None

    def __post_init__(self) -> None:
        """Refuse what can only be a mistake."""
        for name in ("max_memory_bytes", "max_file_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value > 0):
                raise StrategyError(f"option {name}: expected a number > 0, found {value!r}")

    @property
    def threads(self) -> int:
        """Files handled at the same time."""
        cores = len(os.sched_getaffinity(0))
        return self.num_threads or max(2, min(_MAX_THREADS, cores))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block."""
        return self._share_of(self.threads)

    @property
    def chunk_nbytes(self) -> int:
        """Largest chunk of Zarr v3: what a block has with all threads, however many are used."""
        return self._share_of(max(self.threads, _MAX_THREADS))

    def _share_of(self, num_threads: int) -> int:
        max_nbytes = self.max_memory_bytes or self.storage.max_inflight_bytes
        share = max_nbytes // (_BUFFERS * num_threads)
        return max(_LEAST_BLOCK_NBYTES, min(_LARGEST_BLOCK_NBYTES, share))

    @property
    def storage(self) -> Options:
        """Options for reading and writing files."""
        return self.options or options_from_environment()

    def open(
        self, name: str | Path, allow: Allowed, verify: Verify = Verify.READ
    ) -> OpenedCheckpoint:
        """The finished checkpoint of that name.

        What is on its way from storage takes memory too, and is bounded like a block.
        """
        root = resolved(name, self.storage)
        nbytes = self.block_nbytes * (2 if isinstance(root, Bucket) else 1)
        options = self.storage.with_changes(verify=verify, max_inflight_bytes=nbytes)
        return open_at(root, options, allow)


def resolved(name: str | Path, options: Options) -> Location:
    """The location of that name, without links."""
    location = located(name, options)
    return location.resolve() if isinstance(location, Path) else location
