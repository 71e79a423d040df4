"""Serving: the asynchronous engine, its admission control, and the HTTP service."""
