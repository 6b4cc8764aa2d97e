"""The part of torchLoom inside a training process: it measures, reports and applies changes."""
