"""What ``python -m build`` makes holds all that it should, and works where it is installed."""

import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dist_ckpt_strategies
from tests.golden.sets import TP4, GoldenSet
from tests.support.processes import finished

pytest.importorskip("build", reason="the extra `test` has it")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist, built from a copy of the tree: the wheel out of the sdist."""
    root = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, root / "tree", ignore=ignored)
    finished(
        sys.executable, "-m", "build", "--no-isolation", "-o", root / "dist", cwd=root / "tree"
    )
    (wheel,), (sdist,) = ((root / "dist").glob(f"*.{kind}") for kind in ("whl", "tar.gz"))
    return wheel, sdist


def files_below(*folders: str) -> set[str]:
    """Files of the tree that belong into an archive."""
    paths = (path for one in folders for path in (ROOT / one).rglob("*.*") if path.is_file())
    names = {str(path.relative_to(ROOT)) for path in paths}
    return {name for name in names if "__pycache__" not in name and "_build" not in name}


def test_the_archives_have_every_file_and_the_wheel_no_other(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as archive, tarfile.open(built[1]) as tar:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
        in_sdist = {member.name.partition("/")[2] for member in tar}

    assert in_wheel == files_below("dist_ckpt_strategies") | {
        "dist_ckpt_strategies/cli/data/NOTICE"
    }
    assert files_below("dist_ckpt_strategies", "docs", "tests", "benchmarks") <= in_sdist


def test_the_wheel_works_where_it_is_installed(built: tuple[Path, Path], tmp_path: Path) -> None:
    install = ("install", "--no-deps", "--no-index", "--quiet", "--target", tmp_path / "site")
    finished(sys.executable, "-m", "pip", *install, built[0], cwd=tmp_path)
    place = GoldenSet.unpack(TP4, tmp_path).checkpoint
    script = tmp_path / "site" / "bin" / "dist-ckpt"
    site = {"PYTHONPATH": str(tmp_path / "site")}

    version = finished(sys.executable, script, "--version", cwd=tmp_path, variables=site).stdout
    checked = finished(sys.executable, script, "verify", place, cwd=tmp_path, variables=site).stdout

    assert version.startswith(f"dist-ckpt {dist_ckpt_strategies.__version__} (")
    assert " is whole\n" in checked
