"""Megatron-Core's request for an asynchronous save."""

from __future__ import annotations

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

__all__ = ["AsyncRequest"]
