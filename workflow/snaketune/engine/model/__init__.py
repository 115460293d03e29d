"""Models on packed rows: attention over segments, heads and losses, adapters, devices, the self-test."""
