"""Conclusions of the report: facts, rules, verdicts and headline."""
