"""Weights of the bundled trainer: loaded, drawn, adapted, shared out, saved and resumed."""
