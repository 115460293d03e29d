"""Models of the config and of results: loading, adapter stacks, estimated memory."""
