"""As in MindSpeed."""
