"""Checkpoints, tokenizers and chat templates."""
