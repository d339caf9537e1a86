"""Images and videos of a micro-batch: assignment to encoding ranks, and exchange of embeddings."""
