"""Detectors of trouble in a job, from what its ranks report. Pure: the time is passed in.

`kinds_and_responses` has a row for each kind of trouble; each detector has a module with its formula.
`rank_detectors` runs those that learn from the beats of one rank. `hang` and `straggler` compare the ranks of a job.
A `Finding` is a condition that has begun or is over.
"""
