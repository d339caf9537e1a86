"""What jobs do without fcp: static grids, padding, packing; and the small parts that strategies share."""
