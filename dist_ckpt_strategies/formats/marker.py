"""The content of ``metadata.json``: which formats a finished checkpoint uses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Self

from dist_ckpt_strategies.errors import IncompleteCheckpointError


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """The four fields of Megatron-Core's ``CheckpointingConfig``; it takes no others."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1

    @property
    def sharded_format(self) -> tuple[str, int]:
        """Backend and version of the sharded state."""
        return self.sharded_backend, self.sharded_backend_version

    @property
    def common_format(self) -> tuple[str, int]:
        """Backend and version of the common state."""
        return self.common_backend, self.common_backend_version

    def to_json(self) -> bytes:
        """The file's content."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """The marker that the file holds.

        Raises:
            ValueError: not JSON, or not exactly fields of a marker with values of their types.
        """
        try:
            found = json.loads(content)
        except RecursionError as error:
            raise ValueError("nested too deeply for a marker") from error
        known = {field.name: int if "version" in field.name else str for field in fields(cls)}
        if not isinstance(found, dict) or "sharded_backend" not in found:
            raise ValueError("expected an object with the field sharded_backend")
        for name, value in found.items():
            if type(value) is not known.get(name):
                raise ValueError(f"unexpected field {name} = {value!r}")
        return cls(**found)

    @classmethod
    def of_checkpoint(cls, content: bytes, root: object, path: str) -> Self:
        """The marker of the checkpoint at ``root``, from the content of the file at ``path``.

        Raises:
            IncompleteCheckpointError: it does not parse.
        """
        try:
            return cls.from_json(content)
        except (ValueError, TypeError) as error:
            raise IncompleteCheckpointError(
                f"{root} is incomplete: {path} is not whole ({error})", path=path
            ) from error
