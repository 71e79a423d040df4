"""The memory handler: what a model needs, what a device has, and the plan from both."""
