"""The lighthouse of a job under torchft: it decides which replicas train together, and drops evicted ones at once."""
