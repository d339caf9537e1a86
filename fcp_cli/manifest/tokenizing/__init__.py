"""Tokenizers, chat templates, and where they are found."""
