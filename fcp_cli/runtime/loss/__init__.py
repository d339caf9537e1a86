"""The loss whose gradient no plan can change, from logits or from a head's input."""
