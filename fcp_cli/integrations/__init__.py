"""Make the models of other libraries run their attention on the plan's rings."""
