"""The releases that wrote old checkpoints, downloaded once into pytest's cache.

Each is in a directory of its own without what it depends on, but for the last one that has a Zarr
backend of its own: its environment, with zarr 2.18 and numpy 1, serves them all. Torch, which takes
longer to install than everything else, is that of the tests.
"""

import fcntl
import os
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.interop.content import VERSIONS
from tests.support.processes import finished

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
LIMIT_S = 900.0


@pytest.fixture(scope="session")
def releases(pytestconfig: pytest.Config) -> Path:
    """Directories of releases by version, and ``environment`` of 0.15.3."""
    directory = Path(pytestconfig.cache.mkdir("megatron_releases"))
    with (directory / "lock").open("w") as lock:  # of workers of pytest
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = f"{VERSIONS} {REQUIREMENTS.read_text()}"
        mark = directory / "installed"
        if not mark.exists() or mark.read_text() != wanted:
            for path in directory.iterdir():
                if path.name != "lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            install(directory)
            mark.write_text(wanted)
    return directory


def install(directory: Path) -> None:
    pip = ("-m", "pip", "install", "-q", "--no-compile")
    # Without what conftest.py and tox set: a resolver that asks once, and our versions.
    variables = {"PIP_CONSTRAINT": os.devnull, "PYTHONPATH": "", "RES_OPTIONS": ""}
    for version in VERSIONS:
        to = ("--no-deps", "--target", directory / version, f"megatron-core=={version}")
        finished(sys.executable, *pip, *to, variables=variables, limit_s=LIMIT_S)
    venv.create(directory / "environment", with_pip=True)
    python = directory / "environment" / "bin" / "python"
    finished(python, *pip, "--no-deps", "-r", REQUIREMENTS, variables=variables, limit_s=LIMIT_S)
    (own,) = (directory / "environment").glob("lib/*/site-packages")
    (own / "ours.pth").write_text(sysconfig.get_path("purelib"))  # sought after its own
