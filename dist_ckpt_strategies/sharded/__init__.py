"""Save and load of a sharded state dict: the plans, and what carries them out."""
