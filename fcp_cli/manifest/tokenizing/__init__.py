"""Tokenizers, chat templates, and their locations."""
