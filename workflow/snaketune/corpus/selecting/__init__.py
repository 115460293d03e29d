"""Selection of valid rows: cleaning, removal of duplicates and test data, split by prompt, caps and weights."""
