"""Results on disk: manifests, payload files and their digests."""
