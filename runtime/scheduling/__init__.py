"""Selects the requests of each step, and how many drafts it verifies. Does not import torch."""
