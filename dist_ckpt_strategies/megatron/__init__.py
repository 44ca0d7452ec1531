"""Adapter to Megatron-Core, its only importer: types, save and load flow, registry."""
