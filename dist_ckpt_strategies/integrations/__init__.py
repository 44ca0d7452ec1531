"""Adapters to Megatron-LM, Lightning and NeMo; each is imported only when asked for by name."""
