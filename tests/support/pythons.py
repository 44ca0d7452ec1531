"""Scripts in processes of their own, which find only what they import themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


class Python:
    """Runs scripts."""

    def run(self, script: Path, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a script in the directory where it is; what it printed, and its exit status."""
        return subprocess.run(
            [sys.executable, "-W", "ignore", str(script), *args],
            cwd=script.parent,
            env={**os.environ, "PYTHONPATH": str(_ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
