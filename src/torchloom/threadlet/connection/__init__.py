"""The link to the control plane: one thread per rank that connects, reports, listens and reconnects."""
