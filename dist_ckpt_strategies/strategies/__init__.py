"""Face to training code: the registry, Megatron-Core strategy classes, save and load."""
