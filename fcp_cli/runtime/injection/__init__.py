"""Make a training script that knows nothing of plans follow one: start it, and hook frameworks as it imports them.

Nothing in here imports torch or a framework: they must be imported by the script, after its own settings, and only then
be hooked.
"""
