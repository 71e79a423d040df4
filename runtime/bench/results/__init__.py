"""The JSON document of the benchmark, comparisons of two, and the tables."""
