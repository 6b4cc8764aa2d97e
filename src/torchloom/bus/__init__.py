"""How every part reaches NATS: connections, credentials, clients, and the embedded server."""
