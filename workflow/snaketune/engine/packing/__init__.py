"""Sequences packed into rows: planner, segments, prefix trees, the format of rows and their reader."""
