"""What a plan says of itself: settings, masks, mixture, refits, hash, and the command that makes it again."""
