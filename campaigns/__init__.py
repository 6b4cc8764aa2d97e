"""Long seeded fault runs: `make campaign`. Each prints its seed, and the same seed gives the same faults."""
