"""Format ("zarr", 2): sharded Zarr v3 arrays, and a manifest with the digest of every piece."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options, Verify, options_from_environment
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter, Format2Writer
from dist_ckpt_strategies.formats.checkpoints import (
    Format1Checkpoint,
    Format2Checkpoint,
    Share,
    has_manifest,
)
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.storage.base import StoredCheckpoint
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.strategies.registry import require_own
from dist_ckpt_strategies.strategies.sharded_strategies import (
    BaseLoadShardedStrategy,
    BaseSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.zarr import stored_metadata

BACKEND = "zarr"
VERSION = 2


class Format2SaveShardedStrategy(BaseSaveShardedStrategy):
    """Save strategy for ("zarr", 2): every piece of every array with its digest.

    One file for each shard, or chunk of shards that lie on no grid, written by one rank; a manifest
    that lists them all. See docs/format2.md.

    Args:
        backend: name of the format; ``"zarr"``.
        version: version of the format; 2.
        group: ranks that save together; the world by default.
        options: timeouts and memory bounds; by default what the environment says.
        allow: further classes that ShardedObjects may be of; a load has to allow them too.
    """

    takes_urls = True

    @raises_megatron_errors
    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        *,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        require_own((BACKEND, VERSION), backend, version)
        super().__init__(
            backend,
            version,
            group=group,
            options=options,
            allow=allow,
        )

    def open_writer(
        self, root: Location, global_rank: int, *, keeps_old: bool, overwrite: bool
    ) -> CheckpointWriter:
        """See BaseSaveShardedStrategy."""
        return Format2Writer(
            root,
            self._options,
            global_rank=global_rank,
            keeps_old=keeps_old,
            overwrite=overwrite,
        )


class Format2LoadShardedStrategy(BaseLoadShardedStrategy):
    """Load strategy for ("zarr", 2): what is read is verified.

    The common state's file is compared with the manifest too, before anything is returned.

    Args:
        verify: ``"read"`` (the default), ``"full"`` or ``"off"``; see Options.
        group: ranks that load together; the world by default.
        options: timeouts and memory bounds; by default what the environment says.
        allow: further classes that ShardedObjects may be unpickled to.
    """

    takes_urls = True

    @raises_megatron_errors
    def __init__(
        self,
        *,
        verify: str | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        chosen = (options or options_from_environment()).with_changes(verify=verify)
        super().__init__(group=group, options=chosen, allow=allow)

    def verifying(self, verify: str) -> Self:
        """The same strategy with another choice of ``verify``.

        Raises:
            StrategyError: no such choice.
        """
        return self._with_changes(verify=verify)

    def open_checkpoint(self, root: Location, options: Options, share: Share) -> StoredCheckpoint:
        """See BaseLoadShardedStrategy."""
        checkpoint = Format2Checkpoint(root, options)
        if options.verify is Verify.FULL:
            checkpoint.require_whole(share)
        elif share.rank == 0:
            checkpoint.require_common()
        return checkpoint

    def stored_metadata(self, root: Location, *, with_objects: bool) -> StateDict:
        """See BaseLoadShardedStrategy."""
        checkpoint = Format2Checkpoint(root, self._options)
        return manifest_metadata(checkpoint, with_objects=with_objects)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Not offered: what a manifest lists stays as it was written.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            f"{checkpoint_dir}: arrays {key_prefix}* cannot be removed from a checkpoint of format "
            "('zarr', 2); load what is to stay, and save it"
        )

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"zarr"``."""
        require_own((BACKEND, VERSION), loaded_backend, VERSION)

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless the version is 2."""
        require_own((BACKEND, VERSION), BACKEND, loaded_version)


class EitherFormatLoadShardedStrategy(Format2LoadShardedStrategy):
    """Loads ("zarr", 1) and ("zarr", 2): by what lies in the directory."""

    def open_checkpoint(self, root: Location, options: Options, share: Share) -> StoredCheckpoint:
        """See BaseLoadShardedStrategy."""
        if isinstance(root, Bucket) or has_manifest(root):
            return super().open_checkpoint(root, options, share)
        return Format1Checkpoint(root, options)

    def stored_metadata(self, root: Location, *, with_objects: bool) -> StateDict:
        """See BaseLoadShardedStrategy."""
        if isinstance(root, Bucket) or has_manifest(root):
            return super().stored_metadata(root, with_objects=with_objects)
        return stored_metadata(root, with_objects=with_objects)

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless the version is 1 or 2."""
        if loaded_version != 1:
            require_own((BACKEND, VERSION), BACKEND, loaded_version)


def manifest_metadata(checkpoint: Format2Checkpoint, *, with_objects: bool) -> StateDict:
    """ShardedTensors (and objects) without data for all that a checkpoint holds. Rank-local."""
    manifest = checkpoint.manifest
    found: StateDict = {
        record.array.key: metadata_tensor(record.array) for record in manifest.arrays()
    }
    if with_objects:
        found |= {r.id.unique_key: metadata_object(r.id) for r in manifest.objects()}
    return found
