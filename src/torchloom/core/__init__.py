"""The pure core: it looks and judges. No clock, no input or output, no chance: time and events are arguments."""
