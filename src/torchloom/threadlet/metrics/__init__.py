"""What a rank measures and shows: step times, waiting, values given to step(), phases, liveness, stacks."""
