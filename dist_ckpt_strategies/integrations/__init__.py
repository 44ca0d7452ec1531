"""Adapters to Megatron-LM, DCP, Lightning, NeMo; each is imported only when asked for by name."""
