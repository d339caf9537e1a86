"""Configurations of Hugging Face: read into descriptions."""
