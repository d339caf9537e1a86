"""What a rank measures of each step, how rank 0 learns it from all, and the one place where it is written."""
