"""A commit whose new index is in place, although an error says that it could not be written."""

from pathlib import Path

import pytest

from dist_ckpt_strategies.errors import StorageError, StorageTimeoutError
from dist_ckpt_strategies.formats.index import INDEX_NAME, NewSave, full_index_of
from dist_ckpt_strategies.formats.pack_commit import commit, current_save
from dist_ckpt_strategies.storage.files import Directory


class FailsAfterRename(Directory):
    """The new index is in place, and then its flush does not work."""

    is_broken = False
    can_be_read = True

    def write(self, name: str, content: bytes, *, key: str | None = None) -> None:
        super().write(name, content, key=key)
        if name == INDEX_NAME:
            self.is_broken = True
            raise StorageError("its directory cannot be flushed")

    def read(self, name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        if self.is_broken and name == INDEX_NAME and not self.can_be_read:
            raise StorageError("it cannot be read")
        return super().read(name, byte_offset, nbytes)


@pytest.mark.parametrize("can_be_read", [True, False])
def test_a_save_that_may_be_committed_keeps_its_files(can_be_read: bool, tmp_path: Path) -> None:
    place = FailsAfterRename(tmp_path)
    place.can_be_read = can_be_read
    if can_be_read:
        assert commit(place, NewSave("1-a", (), (), {})) is None
    else:
        with pytest.raises(StorageTimeoutError, match=r"cannot be told.*flushed"):
            commit(place, NewSave("1-a", (), (), {}))

    assert (tmp_path / full_index_of("1-a")).exists()
    found = current_save(Directory(tmp_path))
    assert found is not None
    assert found.pointer.save_id == "1-a"
