"""Files, buckets, the thread pool and the time limit. Knows nothing of ranks and formats."""
