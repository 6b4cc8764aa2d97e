"""Live changes and orders: requests, targets, and the coordinator of the two-phase commit."""
