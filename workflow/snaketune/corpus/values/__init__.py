"""What rows hold, typed once for all layouts: turns, texts, calls, tools, choices, verdicts, and the columns that hold them."""
