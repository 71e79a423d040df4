"""Reads what an nsys session leaves: where the time of each step went, by layer and operation.

`stepgraph report` is the command line (`__main__`). `database` opens an export
and probes what it has, `payload` decodes what ranges carry, `export` gives typed rows, `assembly`
makes steps of them (`traced_steps`), `parts` the operations and layers; `document` is the report as
data, `comparison` that of two, `tables` their text.
"""
