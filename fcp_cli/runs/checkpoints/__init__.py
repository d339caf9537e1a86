"""What a checkpoint says of itself, and whether its files are whole."""
