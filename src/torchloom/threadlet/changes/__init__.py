"""A rank's side of live changes: knobs, the two-phase commit's participant, and what happens at step boundaries."""
