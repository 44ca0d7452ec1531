"""Get training going again: from local checkpoints, from global ones, whichever is newest."""

from __future__ import annotations

from dist_ckpt_strategies.recovery.latest import Attempt, Loaded, Tier, load_latest

__all__ = ["Attempt", "Loaded", "Tier", "load_latest"]
