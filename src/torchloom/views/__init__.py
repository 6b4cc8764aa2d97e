"""Where people look: what the weaver shows, turned into text. Nothing here reads a clock, a file or the network."""
