"""Speculative decoding: proposers of drafts, and the choice of how many are verified. No torch."""
