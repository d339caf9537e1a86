"""Published strategies, one file each, written from their descriptions or code."""
