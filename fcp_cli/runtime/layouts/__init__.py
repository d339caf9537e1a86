"""Which tokens of a pack each member of a group holds, and in which order a ring visits them."""
