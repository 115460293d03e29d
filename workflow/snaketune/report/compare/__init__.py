"""Comparisons of the report: models, DPO variants and earlier runs."""
