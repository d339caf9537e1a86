"""Images and videos: the tokens they make, the pieces that an encoder can run separately, the families of models.

`processors` needs no torch and serves the manifest; `parts` and the modules of the families serve the training job. The
cost of the encoder is with the cost model, its measurement with profiling, its shards with the runtime.
"""
