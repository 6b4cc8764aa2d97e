"""The service that decides: it reads, decides, stores, publishes; and `loom up`, which keeps it running."""
