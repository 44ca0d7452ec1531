"""Without a registry in Megatron-Core, this package's own save and load take over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.pythons import Python

SCRIPT = Path(__file__).with_name("later_megatron.py")


@pytest.mark.multiprocess
@pytest.mark.parametrize("what_is_gone", ["names", "module"])
def test_save_and_load_take_over_where_megatron_has_no_registry(
    what_is_gone: str, plain_python: Python, tmp_path: Path
) -> None:
    script = Path(shutil.copy(SCRIPT, tmp_path / "script.py"))

    done = plain_python.run(script, str(tmp_path), what_is_gone)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"zarr {n}: {[True] * 10}" for n in (1, 2)]
    assert not list(tmp_path.rglob("*.distcp"))
