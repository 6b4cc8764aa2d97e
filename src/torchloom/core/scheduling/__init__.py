"""How many loaders each job has: predict throughput, allocate within the budgets of nodes, order the moves. Pure.

`throughput_model` predicts samples/s from measurements. `cluster_loaders` has the budgets, the jobs and their loaders;
`allocation` improves on it, `stability` takes back what is not worth a move, and `policies` compares this with other
rules. `moves` orders resizes so that no node exceeds its budget. `simulation` runs it all on a virtual clock.
"""
