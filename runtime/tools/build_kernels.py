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

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 1 if a library could not be built.

    Prints the path of each library on stdout and progress on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="stepgraph build-kernels",
        description="Compile the C++ kernels, so that processes need no compiler to start.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the libraries; set STEPGRAPH_KERNEL_DIR to it at run time (default: the "
        "user's cache, where every start looks)",
    )
    parser.add_argument(
        "--march",
        nargs="+",
        default=["native"],
        metavar="CPU",
        help="CPUs to compile for, as the compiler names them (x86-64-v3, x86-64-v4, znver4, ...); "
        "a start selects the best library for its CPU (default: native, this machine)",
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress on stderr")
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
