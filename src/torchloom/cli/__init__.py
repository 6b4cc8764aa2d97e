"""Every command. A verb imports what it needs when it runs, so that the others start fast."""
