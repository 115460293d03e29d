"""Raw rows to canonical ones: which layout a row has, who says what in it, and whether that makes a sound row."""
