"""Replicas under torchft: groups of runs, members of quorums, eviction and drain."""
