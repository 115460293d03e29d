"""What a result on disk is: manifests, digests, tables."""
