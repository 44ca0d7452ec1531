"""``dist-ckpt demo --chaos``: faults at every point of a training step, and what comes after them."""
