"""Sources, layouts, quarantine, duplicates, splits: raw rows to canonical conversations and preference pairs."""
