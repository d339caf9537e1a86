"""The search under `sync: microbatch`: waves filled up to a target each, and replanning of pairs of waves."""
