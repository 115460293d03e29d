"""Results on disk: manifests, payload files and their digests.

A result is a folder with a payload and `manifest.json`, which is written last. `manifest.py` writes, reads and verifies it; two
results with one digest are the same result to whatever reads them.
"""
