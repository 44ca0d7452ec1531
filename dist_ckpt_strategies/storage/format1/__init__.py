"""Format ("zarr", 1): Zarr v2 arrays through TensorStore or zarr-python; what a directory holds."""
