"""A small stand-in for MindSpeed: its names and signatures where fcp meets them, and an attention that is plain.

Its ring takes everything that makes it a ring from what Megatron and MindSpeed are asked in the call, as the real one
does, so that a hook that is missing or wrong shows in numbers.
"""
