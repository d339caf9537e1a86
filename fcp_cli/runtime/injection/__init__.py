"""Makes a training script that knows nothing of plans follow one: starts it, and hooks frameworks as it imports them.

Nothing in here imports torch or a framework: they must be imported by the script, after its own settings, and only then
be hooked.
"""
