"""What the ranks of test_ranks run: rank 1 fails, or hangs, and rank 0 does not notice."""

from __future__ import annotations

import os
import sys
import time

if __name__ == "__main__" and os.environ["RANK"] == "1":
    if sys.argv[1] == "hang":
        time.sleep(1000)
    sys.exit(sys.argv[1])
