"""What recovery asks of a training, under the names by which users import it."""

from __future__ import annotations

from dist_ckpt_strategies.run.state_provider import StateProvider
from dist_ckpt_strategies.spec.phase import Phase

__all__ = ["Phase", "StateProvider"]
