"""Without a registry in Megatron-Core, this package's own save and load take over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("later_megatron.py")


@pytest.mark.multiprocess
def test_save_and_load_take_over_where_megatron_has_no_registry(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"zarr {n}: {[True] * 4}" for n in (1, 2)]
    assert not list(tmp_path.rglob("*.distcp"))
