"""Format ("zarr", 2): sharded Zarr v3 files with digests, their manifest; what a place holds."""
