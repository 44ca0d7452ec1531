"""Open the array store of an engine."""

from __future__ import annotations

from pathlib import Path

from dist_ckpt_strategies.config import Engine, Options
from dist_ckpt_strategies.errors import MissingDependencyError
from dist_ckpt_strategies.storage.base import ArrayStore
from dist_ckpt_strategies.storage.file_systems import permitted_access


def open_array_store(root: Path, options: Options) -> ArrayStore:
    """The array store of ``options.engine`` over a checkpoint directory.

    Raises:
        MissingDependencyError: the engine's library is not installed.
    """
    try:
        if options.engine is Engine.ZARR:
            from dist_ckpt_strategies.formats.zarr2_python import ZarrPythonArrays  # noqa: PLC0415

            return ZarrPythonArrays(root, options.io_threads, options.max_inflight_bytes)
        from dist_ckpt_strategies.formats.zarr2_tensorstore import (  # noqa: PLC0415
            TensorStoreArrays,
        )

        access = permitted_access(root, options)
        return TensorStoreArrays(
            root, access, options.io_threads, options.timeout_s, options.max_inflight_bytes
        )
    except ImportError as error:
        other = next(engine for engine in Engine if engine is not options.engine)
        raise MissingDependencyError(
            f"engine {options.engine} needs a package that does not import here ({error}); "
            f"install it, or choose engine={other.value!r}"
        ) from error
