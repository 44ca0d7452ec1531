"""Convert, compare, upgrade and prune checkpoints: one process, bounded memory."""
