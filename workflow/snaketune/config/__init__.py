"""Typed models of every config key; a config is refused here, by key, value and what was expected, or nowhere."""
