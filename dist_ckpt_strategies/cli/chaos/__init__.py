"""``dist-ckpt demo --chaos``: faults at every point of a step, and what comes after them."""
