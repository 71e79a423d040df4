"""The engine: requests, step loop, startup, threads. Read `engine` first."""
