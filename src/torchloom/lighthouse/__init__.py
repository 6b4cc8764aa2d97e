"""Runs beside a job of torchft's replicas: tells them who trains together, and at once when one of them is gone."""
