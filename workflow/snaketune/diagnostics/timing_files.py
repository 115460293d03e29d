"""Names of the files that timings write, for readers that don't import what timings need."""

MEASURED = "measured.json"
# For chrome://tracing and Perfetto.
TRACE = "trace.json.gz"
