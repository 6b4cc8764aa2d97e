"""What `loom run` does in the user's terminal: submit, follow, show output, and end the job on Ctrl-C."""
