"""Keeping training: checkpoints that verify. What is here needs no torch, so the weaver and the agent can use it."""
