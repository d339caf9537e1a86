"""Follow a plan that is made during training, from sequences whose lengths are only known as they arrive."""
