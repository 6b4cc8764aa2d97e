"""What the rows of a workload file train: architectures in plain torch, a synthetic dataset, a training script."""
