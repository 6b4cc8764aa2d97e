"""Facts about the training process: its identity, its hardware, how it ended, which modules it imports."""
