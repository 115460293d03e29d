"""The numbers of the report, read from manifests and results."""
