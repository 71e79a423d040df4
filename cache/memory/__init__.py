"""The memory plan: computed from what a model needs and what a device has."""
