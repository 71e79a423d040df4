"""Asks a CUDA graph under capture for its nodes; see `attribution.NodeSource`."""
