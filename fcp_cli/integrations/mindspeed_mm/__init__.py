"""MindSpeed-MM's FSDP2 engine under a plan."""
