"""Small modules used on both sides of the wire that are no messages: process ids, liveness page, incarnations."""
