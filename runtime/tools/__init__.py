"""Command-line tools. Only they and `bench` import this package."""
