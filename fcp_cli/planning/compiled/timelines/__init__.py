"""The search under `sync: iteration`: rings on rank timelines, and single-rank packs in the time that rings leave."""
