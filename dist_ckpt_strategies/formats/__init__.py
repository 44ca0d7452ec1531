"""Checkpoint formats: what a checkpoint holds, and what is wrong with it. Loads no torch."""
