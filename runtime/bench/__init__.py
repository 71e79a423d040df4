"""`stepgraph bench` and `stepgraph explain`.

`cli` is the command, `options` its flags, `benchmark_run` what all measurements with engines share,
`steady` and `serve` the scenarios, `results` the JSON document and what is printed of it. `peers`
are other runtimes. Importing the package imports none of them.
"""
