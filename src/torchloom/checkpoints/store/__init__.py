"""The checkpoint folder on disk: how checkpoints are committed, found, verified and deleted. Needs no torch."""
