"""`stepgraph bench` and `stepgraph explain`.

`cli` is the command, `options` its flags, `benchmark_run` what all measurements with engines share,
`results` the JSON document and what is printed of it. `scenarios/` has a file per measurement.
`baseline` and `peers` are other runtimes. Importing the package imports none of them.
"""
