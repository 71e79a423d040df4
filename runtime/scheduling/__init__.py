"""Selects the requests of each step. Does not import torch."""
