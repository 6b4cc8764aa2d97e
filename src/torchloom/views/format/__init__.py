"""Formats of tables, numbers, times and names."""
