"""Typed models of every config key. All validation of a config happens here, with errors that name the key, the value and what
was expected."""
