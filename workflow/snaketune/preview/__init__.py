"""Previews: the rows of files as the model would see them, before any result is computed."""
