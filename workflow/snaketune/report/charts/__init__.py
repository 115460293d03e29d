"""The charts of the report."""
