"""Requests to servers: sent, retried, counted and bounded. What is asked, and what is read of an answer, is in `sampling`."""
