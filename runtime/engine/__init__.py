"""The engine: intake, step loop, startup, threads. Read `engine` first."""
