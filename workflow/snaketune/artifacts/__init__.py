"""The one way to disk: digests, manifests, work folders and atomic publishing."""
