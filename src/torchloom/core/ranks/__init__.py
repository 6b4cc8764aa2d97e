"""Ranks: how they join, are lost, come back and end, and what they report about checkpoints."""
