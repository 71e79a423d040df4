"""Other runtimes that the benchmark compares with."""
