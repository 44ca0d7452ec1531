"""Public API for training code: registry, Megatron-Core strategy classes, save and load."""
