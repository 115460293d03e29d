"""The batch plan of a training: what fits the machine, and what is fastest on it."""
