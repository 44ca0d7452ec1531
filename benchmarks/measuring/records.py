"""Results as JSON lines that say what was measured, on what, and by which command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "megatron-core",
    "ml_dtypes",
    "numpy",
    "safetensors",
    "tensorstore",
    "torch",
    "xxhash",
    "zarr",
)


class JsonLines:
    """Writes one JSON object per line, each at once, so that a run cut short leaves its samples."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, kind: str, content: Any, **more: Any) -> None:
        """Add a line: the fields of ``content`` (a dataclass or a mapping), and ``more``."""
        line = {"kind": kind, **_plain(content), **{k: _plain(v) for k, v in more.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _plain(value: Any) -> Any:
    """A dataclass as a mapping, its own first; anything else as it is."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def run_facts(command: Iterable[str]) -> dict[str, Any]:
    """Commit, command, versions and machine."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "has_local_changes": _git("status", "--porcelain") != "",
        "command": shlex.join(command),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "machine": {
            "processor": _processor(),
            "num_cores": os.cpu_count(),
            "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
            "load_average": os.getloadavg()[0],
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*args: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
