"""The search under `sync: microbatch`: waves, each filled by a target, and pairs of them planned again."""
