"""What `loom doctor` checks."""
