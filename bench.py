"""Benchmarks this checkout: the same command as the installed `stepgraph bench`."""

import sys

from stepgraph.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
