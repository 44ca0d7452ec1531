"""Save and load of a sharded state dict; ``save`` and ``load`` are to be read first."""
