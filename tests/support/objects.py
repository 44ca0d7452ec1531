"""Objects written as a save of format 1 does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.formats.objects import dump_object, write_dumped


def write_object(root: Path, object_id: ObjectId, obj: Any) -> int:
    """Store one shard of an object, durably; returns its size in bytes."""
    content = dump_object(obj, name=object_id.unique_key)
    write_dumped(root, object_id, content)
    return len(content)
