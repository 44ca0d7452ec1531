"""Write a file of so many bytes and flush it: a process that does nothing else.

python raw_writer.py FILE NBYTES
"""

from __future__ import annotations

import os
import sys

_BLOCK = bytes(8 << 20)


def main(name: str, nbytes: int) -> None:
    """Write blocks of zeros, the last one shorter."""
    with open(name, "wb", buffering=0) as file:  # noqa: PTH123 - starts faster without pathlib
        file.writelines(_BLOCK[: nbytes - done] for done in range(0, nbytes, len(_BLOCK)))
        os.fsync(file.fileno())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
