"""What torchLoom understands of others: each module one system, and nothing else needs it."""
