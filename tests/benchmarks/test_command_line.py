from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_script

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("script", ["save_load.py", "two_stage.py"])
def test_an_unknown_contender_is_refused_by_name(script: str, tmp_path: Path) -> None:
    done = run_script(script, tmp_path, "--contender", "tape")
    assert done.returncode == 2
    assert "'tape'" in done.stderr
