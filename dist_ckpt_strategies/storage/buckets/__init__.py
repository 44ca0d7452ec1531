"""Checkpoints in object stores: objects are put whole, and nothing is renamed."""
