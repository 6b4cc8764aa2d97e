"""The fork server of a job on a node: it is the parent of the ranks, reaps them, and outlives its agent."""
