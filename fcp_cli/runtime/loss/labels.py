"""Label constants, without torch."""

IGNORED = -100  # label of a token without a next token to predict; PyTorch's default ignore_index
