"""Sound rows to those that are used: cleaned, without duplicates and test data, split by prompt, mixed by caps and weights."""
