"""Checkpoints: saved in the background, verified before they are loaded. `store` needs no torch, the rest does."""
