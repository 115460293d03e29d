"""Comparisons of the report: models, variants and results of other configs."""
