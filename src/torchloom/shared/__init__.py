"""Small modules that several packages use and that are no messages: files, addresses, process ids, liveness."""
