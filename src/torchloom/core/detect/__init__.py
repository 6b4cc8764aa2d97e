"""What is wrong with a job, seen in what its ranks say: pure, the time is passed in.

Each module knows one kind of trouble. `detectors` holds what is learnt of one life of a rank from its beats; `hang` and
`straggler` compare the ranks of a job. What they find is a Finding: a condition that has begun, or is over.
"""
