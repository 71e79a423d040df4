"""Which requests run in the next step. No torch."""
