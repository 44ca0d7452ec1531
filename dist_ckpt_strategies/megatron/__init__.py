"""Adapter to Megatron-Core, its only importer: types, save and load flow, registry."""

from dist_ckpt_strategies.errors import needs_megatron_core

with needs_megatron_core():  # before any of this package's modules below is imported
    from dist_ckpt_strategies.megatron import shards, types  # noqa: F401
