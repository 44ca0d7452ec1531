"""How two checkpoints differ, whatever their formats. No ranks."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.plan.convert import require_whole
from dist_ckpt_strategies.plan.upgrade import is_of_optimizer
from dist_ckpt_strategies.run.diff import DiffReport, run_diff
from dist_ckpt_strategies.spec.conversion import Format, SourceArray
from dist_ckpt_strategies.storage.conversion.sources import Source, open_source
from dist_ckpt_strategies.storage.findings import Watch
from dist_ckpt_strategies.storage.objects.pickled import Allowed
from dist_ckpt_strategies.strategies.convert import ConvertOptions, resolved


@raises_megatron_errors
def diff(
    a: str | Path,
    b: str | Path,
    *,
    keys: str | None = None,
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
) -> DiffReport:
    """Compare two checkpoints bit for bit, in bounded memory. One process.

    Where one of them is of safetensors, only the model's arrays are compared.

    Args:
        a: directory of a finished checkpoint: ("zarr", 1), ("zarr", 2), torch_dist, safetensors.
            Of ("zarr", 2) also its URL.
        b: another one.
        keys: compare only arrays whose keys match this glob, and no objects.
        allow: further classes that objects and the common state may be unpickled to.
        options: memory and threads.
        watch: told about bytes of one of them, done and in all, by any thread.

    Raises:
        ArrayNotFoundError: no key in either of them matches.
        StorageError: one of them is missing or damaged.
        UnsafeObjectError: an object that differs needs a class that is not allowed.
    """
    chosen = options or ConvertOptions()
    storage = chosen.options or options_from_environment()
    roots = [resolved(name, storage) for name in (a, b)]
    allowed = [*default_allowed(), *allow]
    one, other = (open_source(root, chosen.reading(root), allowed) for root in roots)
    weights_only = Format.SAFETENSORS in {s.marker.sharded_backend for s in (one, other)}
    mine, theirs = (_arrays(source, keys, weights_only=weights_only) for source in (one, other))
    if keys is not None and not (mine or theirs):  # nothing compared would be called equal
        raise ArrayNotFoundError(f"{one.root} and {other.root}: no array's key matches {keys!r}")
    return run_diff(
        one,
        other,
        [(mine.get(key), theirs.get(key)) for key in sorted(mine.keys() | theirs.keys())],
        box_nbytes=chosen.box_nbytes,
        num_threads=chosen.threads,
        allow=allowed,
        with_objects=keys is None and not weights_only,
        watch=watch,
    )


def _arrays(source: Source, keys: str | None, *, weights_only: bool) -> dict[str, SourceArray]:
    """The arrays to compare, each known to be whole."""
    found = {
        array.key: array
        for array in source.arrays
        if (keys is None or fnmatchcase(array.key, keys))
        and not (weights_only and is_of_optimizer(array.key))
    }
    for array in found.values():
        require_whole(array)
    return found
