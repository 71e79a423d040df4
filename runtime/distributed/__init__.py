"""The ranks of a tensor-parallel engine: shared memory, commands, collectives, processes."""
