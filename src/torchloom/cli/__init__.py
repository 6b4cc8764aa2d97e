"""Every command. The module of a verb is imported when the verb is typed, so that the others start fast."""
