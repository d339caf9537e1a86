"""Images and videos: token counts, the parts that an encoder can run separately, and model families.

`processors` needs no torch and serves manifests; `parts` and the family modules serve training. Encoder cost belongs to
the cost model, its measurement to profiling, and its sharding to the runtime.
"""
