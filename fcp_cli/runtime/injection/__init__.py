"""Make an unmodified training script follow a plan: start it, and hook frameworks as it imports them.

Nothing in here imports torch or a framework: the script must import them, after its own settings, and only then can
they be hooked.
"""
