"""`stepgraph bench` and `stepgraph explain`.

`cli` is the command, `options` and `validate_args` its command line, `benchmark_run` what all
measurements with engines share. `scenarios/` has a file per measurement, `runtimes/` the other
runtimes that are compared with, `results/` the JSON document, its comparison and its tables.
Importing the package imports none of them.
"""
