"""What ``python -m build`` makes holds all that it should, and works where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

import dist_ckpt_strategies

pytest.importorskip("build", reason="the extra `test` has it")

ROOT = Path(__file__).parents[2]
NAME = f"dist_ckpt_strategies-{dist_ckpt_strategies.__version__}"
PACKAGE = ROOT / "dist_ckpt_strategies"
IN_GIT = ("MANIFEST.in", "README.md", "LICENSE", "pyproject.toml", "setup.cfg", "tox.ini")


@dataclass(frozen=True)
class Built:
    """The two files, and the names of what is in them."""

    wheel: Path
    sdist: Path
    in_wheel: frozenset[str]
    in_sdist: frozenset[str]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy of the tree, so that nothing is left in it: the wheel out of the sdist."""
    root = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(".git", ".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, root / "tree", ignore=ignored)
    for name in (".ci", ".ruff.toml", ".gitignore"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, root / "tree" / name)
    run(sys.executable, "-m", "build", "--no-isolation", "-o", root / "dist", cwd=root / "tree")
    (wheel,), (sdist,) = ((root / "dist").glob(f"*.{kind}") for kind in ("whl", "tar.gz"))
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as tar:
        files = {member.name.partition("/")[2] for member in tar if member.isfile()}
        return Built(wheel, sdist, frozenset(archive.namelist()), frozenset(files))


def files_below(*folders: str) -> set[str]:
    """Files of the tree that belong into an archive."""
    found = {str(path.relative_to(ROOT)) for one in folders for path in (ROOT / one).rglob("*.*")}
    return {
        name
        for name in found
        if (ROOT / name).is_file() and "__pycache__" not in name and "_build" not in name
    }


def test_the_names_state_the_version(built: Built) -> None:
    assert built.wheel.name == f"{NAME}-py3-none-any.whl"
    assert built.sdist.name == f"{NAME}.tar.gz"


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Built) -> None:
    inside = {name for name in built.in_wheel if ".dist-info/" not in name}

    assert inside == files_below("dist_ckpt_strategies") | {"dist_ckpt_strategies/cli/data/NOTICE"}
    assert "dist_ckpt_strategies/py.typed" in inside
    assert "dist_ckpt_strategies/cli/data/alice29.txt" in inside
    assert not [name for name in built.in_wheel if "test" in name.partition("/")[0]]
    assert [name for name in built.in_wheel if name.endswith("LICENSE")]


def test_the_sdist_has_the_tests_the_pages_and_the_benchmarks(built: Built) -> None:
    expected = files_below("dist_ckpt_strategies", "docs", "tests", "benchmarks")

    assert expected - built.in_sdist == set()
    assert {*IN_GIT, "constraints.txt", "CHANGELOG.md", ".ci/run", ".ruff.toml"} <= built.in_sdist
    assert not [name for name in built.in_sdist if name.endswith(".pyc")]


def test_the_metadata_is_that_of_the_package(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        found = Parser().parsestr(archive.read(f"{NAME}.dist-info/METADATA").decode())
        scripts = archive.read(f"{NAME}.dist-info/entry_points.txt").decode()

    assert (found["Name"], found["Version"]) == (
        "dist-ckpt-strategies",
        dist_ckpt_strategies.__version__,
    )
    assert found["Requires-Python"] == ">=3.11"
    assert {"torch", "tensorstore", "xxhash"} <= {
        requirement.split(">")[0] for requirement in found.get_all("Requires-Dist", [])
    }
    assert "dist-ckpt = dist_ckpt_strategies.cli.app:main" in scripts


def test_the_wheel_works_where_it_is_installed(built: Built, tmp_path: Path) -> None:
    install = ("install", "--no-deps", "--no-index", "--quiet", "--target", tmp_path / "site")
    run(sys.executable, "-m", "pip", *install, built.wheel, cwd=tmp_path)
    packed = ROOT / "tests" / "golden" / "data" / "m0123_tp4_modelonly.tar.xz"
    shutil.unpack_archive(packed, tmp_path, filter="data")
    command = (sys.executable, "-m", "dist_ckpt_strategies.cli")
    place = tmp_path / "m0123_tp4_modelonly" / "ckpt"

    version = run(*command, "--version", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    checked = run(*command, "verify", place, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))

    assert version.startswith(f"dist-ckpt {dist_ckpt_strategies.__version__} (")
    assert " is whole\n" in checked


def test_the_newest_release_of_the_changelog_is_the_version() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    releases = [line for line in lines if line.startswith("## ") and line != "## [Unreleased]"]

    assert releases[0].startswith(f"## [{dist_ckpt_strategies.__version__}] - ")
