"""Speculative decoding: the drafts of a request, and how it is configured. No torch."""
