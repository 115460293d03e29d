"""Measurements of snaketune and of its peers. A package with a file of its own, so that no installed `benchmarks` hides it."""
