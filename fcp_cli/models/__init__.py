"""Models and clusters as figures: their descriptions, the memory they need, and the cost profiles shipped for them."""
