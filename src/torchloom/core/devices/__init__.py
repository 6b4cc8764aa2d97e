"""Devices: failures that are reported, and what follows for the ranks on them."""
