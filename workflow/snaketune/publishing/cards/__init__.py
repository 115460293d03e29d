"""Model cards: results, scores and text."""
