"""The wire: how every part reaches NATS, and the embedded server with its generated configuration."""
