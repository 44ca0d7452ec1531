"""Regions, dtypes, arrays, shards and chunk grids: frozen values and their arithmetic. Pure."""
