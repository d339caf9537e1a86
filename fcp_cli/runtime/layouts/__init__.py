"""Layout of a pack on a group: the tokens of each member, and the work of each hop."""
