"""What the ranks of test_ranks run: rank 1 fails, and rank 0 does not notice."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and os.environ["RANK"] == "1":
    sys.exit(sys.argv[1])
