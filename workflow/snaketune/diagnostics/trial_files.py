"""What trials leave, for those who read it without what trials need."""

MEASURED = "measured.json"
# For chrome://tracing and Perfetto.
TRACE = "trace.json.gz"
