"""Names of the files that trials write, for readers that don't import what trials need."""

MEASURED = "measured.json"
# For chrome://tracing and Perfetto.
TRACE = "trace.json.gz"
