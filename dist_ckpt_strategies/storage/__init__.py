"""Door to disks: array stores, objects, layouts, publication. Knows nothing of ranks."""
