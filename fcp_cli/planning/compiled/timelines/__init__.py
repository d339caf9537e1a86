"""The search under `sync: iteration`: rings on a timeline, and packs of single ranks in the gaps that they leave."""
