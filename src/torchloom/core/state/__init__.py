"""The state of the weaver: durable state, folded from records, and runtime state that a restart forgets."""
