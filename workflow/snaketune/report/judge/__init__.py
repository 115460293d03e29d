"""Judgements of the report: facts, rules, verdict and headline."""
