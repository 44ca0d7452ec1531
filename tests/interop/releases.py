"""``python -m tests.interop.releases DIRECTORY``: get the releases that wrote old checkpoints.

Each into a directory of its own, without what it depends on: the environment of the last of them
has that.
"""

import os
import subprocess
import sys
from pathlib import Path

VERSIONS = ("0.3.0", "0.5.0", "0.6.0", "0.9.0", "0.11.0", "0.12.0", "0.14.0")


def main(directory: Path) -> None:
    """Install those that are not there yet."""
    environment = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    for version in VERSIONS:
        target = directory / version
        if not target.is_dir():
            command = [*install, str(target), f"megatron-core=={version}"]
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
