"""Releases of Megatron-Core that wrote old checkpoints."""

VERSIONS = ("0.3.0", "0.5.0", "0.6.0", "0.9.0", "0.11.0", "0.12.0", "0.14.0")
