"""Checks whether a node is fit to run ranks."""
