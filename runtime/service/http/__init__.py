"""The OpenAI-compatible HTTP service over an `AsyncEngine`."""
