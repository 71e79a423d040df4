"""Executes step plans: inputs, row state, step functions and their outputs."""
