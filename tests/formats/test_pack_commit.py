"""A commit whose outcome cannot be told."""

from pathlib import Path

import pytest

from dist_ckpt_strategies.errors import StorageError, StorageTimeoutError
from dist_ckpt_strategies.formats.index import INDEX_NAME, NewSave, full_index_of
from dist_ckpt_strategies.formats.pack_commit import commit, current_save
from dist_ckpt_strategies.storage.files import Directory


class FailsAfterRename(Directory):
    """The new index is in place, and then neither its flush nor any read of it works."""

    is_broken = False

    def write(self, name: str, content: bytes, *, key: str | None = None) -> None:
        super().write(name, content, key=key)
        if name == INDEX_NAME:
            type(self).is_broken = True
            raise StorageError("its directory cannot be flushed")

    def read(self, name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        if self.is_broken and name == INDEX_NAME:
            raise StorageError("it cannot be read")
        return super().read(name, byte_offset, nbytes)


def test_a_save_that_may_be_committed_keeps_its_files(tmp_path: Path) -> None:
    with pytest.raises(StorageTimeoutError, match=r"cannot be told.*flushed"):
        commit(FailsAfterRename(tmp_path), NewSave("1-a", (), (), {}))

    assert (tmp_path / full_index_of("1-a")).exists()
    found = current_save(Directory(tmp_path))
    assert found is not None
    assert found.pointer.save_id == "1-a"
