"""Door to Megatron-Core: translates its types and flow; the only importer of megatron."""
