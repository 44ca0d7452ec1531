"""Parts of local checkpoints on the nodes' own disks."""
