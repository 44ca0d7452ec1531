"""The store of an engine, and what is said where its library is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import MissingDependencyError
from dist_ckpt_strategies.formats.zarr2_arrays import open_array_store


@pytest.mark.parametrize(
    ("engine", "module", "other"),
    [("tensorstore", "tensorstore", "zarr"), ("zarr", "zarr", "tensorstore")],
)
def test_a_missing_library_is_named_with_the_way_out(
    engine: str, module: str, other: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    adapter = {"tensorstore": "zarr2_tensorstore", "zarr": "zarr2_python"}[engine]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"dist_ckpt_strategies.formats.{adapter}")

    with pytest.raises(MissingDependencyError, match=module) as caught:
        open_array_store(tmp_path, Options(engine=engine))  # type: ignore[arg-type]
    assert f"engine={other!r}" in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_the_one_engine_does_not_import_the_library_of_the_other() -> None:
    program = (
        "import sys, pathlib\n"
        "from dist_ckpt_strategies.config import Options\n"
        "from dist_ckpt_strategies.formats.zarr2_arrays import open_array_store\n"
        "open_array_store(pathlib.Path('.'), Options(engine='zarr'))\n"
        "assert 'tensorstore' not in sys.modules\n"
        "print('fine')\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=False
    )

    assert done.stdout == "fine\n", done.stderr
