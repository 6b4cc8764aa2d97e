"""Traces: what jobs did over time, as CSV files, and a picture that is drawn from them."""
