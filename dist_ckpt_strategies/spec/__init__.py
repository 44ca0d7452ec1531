"""Nouns: regions, dtypes, shards, arrays. Frozen values, no input or output."""
