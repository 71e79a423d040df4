"""Carries out a step plan: inputs, row state, step functions and their outputs."""
