"""What an agent observes: ranks from outside, their stacks and exits, GPUs, and pressure on the machine."""
