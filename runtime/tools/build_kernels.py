"""`stepgraph build-kernels`: compile the CPU kernels beforehand, for images without a compiler.

Also `python -m stepgraph.runtime.tools.build_kernels`. See docs/containers.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import KernelBuildError


def main(argv: Sequence[str] | None = None) -> int:
    """Print the path of each library; return 0, or 1 if a library could not be built."""
    parser = argparse.ArgumentParser(
        prog="stepgraph build-kernels",
        description="Compile the C++ kernels, so that processes need no compiler to start.",
    )
    add = parser.add_argument
    out = (
        "folder for the libraries; set STEPGRAPH_KERNEL_DIR to it at run time (default: the user's"
    )
    add("--out", type=Path, metavar="DIR", help=f"{out} cache, where every start looks)")
    march = "CPUs to compile for, as the compiler names them (x86-64-v3, x86-64-v4, znver4, ...); a"
    march += " start selects the best library for its CPU (default: native, this machine)"
    add("--march", nargs="+", default=["native"], metavar="CPU", help=march)
    add("--quiet", action="store_true", help="print no progress on stderr")
    options = parser.parse_args(argv)
    from ..kernels import build_kernels  # needs torch

    if options.quiet:
        os.environ["STEPGRAPH_QUIET"] = "1"
    try:
        for march in options.march:
            print(build_kernels(options.out, march=march))
    except KernelBuildError as error:
        print(f"stepgraph build-kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
