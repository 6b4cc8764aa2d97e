"""Jobs as users write them: options of `loom run`, job.toml, rules of a policy, replicas under torchft."""
