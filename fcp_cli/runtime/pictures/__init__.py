"""Images and videos of a micro-batch: which rank encodes each, and the cache of embeddings."""
