"""Images and videos of the bundled trainer: decoded ahead, and given to the model."""
