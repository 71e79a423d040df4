"""The samplers."""
