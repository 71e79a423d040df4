"""Grammars that outputs follow: compiled, and advanced token by token."""
