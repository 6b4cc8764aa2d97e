"""On each node: starting, watching and ending the ranks of a job."""
