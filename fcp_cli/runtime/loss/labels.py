"""Labels of tokens, without torch."""

IGNORED = -100  # label of a token that has no next token to predict, as everywhere in PyTorch
