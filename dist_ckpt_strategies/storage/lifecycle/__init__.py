"""How a directory becomes a checkpoint, what its marker says, and how it goes."""
