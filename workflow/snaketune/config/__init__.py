"""Typed models of every config key, and what they resolve to: the plan of jobs."""
