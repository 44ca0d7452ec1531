"""``dist-ckpt bench``: how fast checkpoints are saved and loaded on a file system."""
