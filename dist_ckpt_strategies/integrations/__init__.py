"""Thin adapters to Lightning and NeMo; each is imported only when it is asked for by name."""
