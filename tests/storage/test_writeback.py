"""A file that the disk has begun with is no other file."""

from __future__ import annotations

import os
from pathlib import Path

from dist_ckpt_strategies.storage.direct_io import begin_writeback


def test_what_was_written_stays_and_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    content = bytes(range(256)) * 64
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(content)
        begin_writeback(file.fileno(), 0, len(content))
        begin_writeback(file.fileno(), 1 << 40, 1 << 40)
        os.fsync(file.fileno())
        handle = file.fileno()
    begin_writeback(handle, 0, len(content))  # closed by now

    assert (tmp_path / "file").read_bytes() == content
