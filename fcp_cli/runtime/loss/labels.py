"""Label constants, without torch."""

IGNORED = -100  # label of a token without loss, such as a prompt's; the default `ignore_index` of PyTorch
