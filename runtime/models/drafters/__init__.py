"""Drafters: models that propose the next tokens of a row on the device, inside a step."""
