"""What a result on disk is: manifests and digests."""
