"""Plan-independent loss, from logits or from the input of the head."""
