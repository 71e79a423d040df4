"""The measurements of `stepgraph bench`, one file each."""
