"""What torchLoom promises to cost and to be fast at, measured against a peer in the same run.

`python -m benchmarks` runs all of them; `python -m benchmarks.NAME` one. The last line each prints is a JSON object.
"""
