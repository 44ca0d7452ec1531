"""Format ("zarr", 2): sharded Zarr v3 files with digests, their manifest; where a save goes."""
