"""Inside a training process: who it is, what it reports, and the thread that carries it. Never slows or stops it."""
