"""Later releases of Megatron-Core: its save and load with this package's strategies, and ours."""

import shutil
from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPT = Path(__file__).with_name("later_megatron.py")


@pytest.mark.multiprocess
@pytest.mark.parametrize("release", ["0.17", "0.19"])
def test_every_way_works_beside_a_later_release(release: str, tmp_path: Path) -> None:
    script = Path(shutil.copy(SCRIPT, tmp_path / "script.py"))

    done = run_script(script, str(tmp_path), release)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this release of Megatron-Core has no registry"), done.stdout
