"""Flags that say which model runs, in which dtypes, and how its steps run."""

from __future__ import annotations

import argparse

from ..config import EngineConfig
from .flag_types import positive_integer

__all__ = ["MODES", "add_engine_flags", "add_model_flags"]

MODES = ("eager", "compile", "graph")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of models, device and dtypes; each combination of the lists is a model."""
    parser.add_argument(
        "--model",
        nargs="+",
        default=["demo"],
        help="checkpoint directory, hub id, preset:NAME (random weights) or demo (default: demo)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: auto)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["auto"],
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of weights and activations (default: auto, as stored)",
    )
    parser.add_argument(
        "--weight-dtype",
        nargs="+",
        default=["auto"],
        choices=("auto", "int8", "fp8"),
        help="dtype of the weights of linear layers (default: auto, as --dtype)",
    )
    parser.add_argument(
        "--kv-dtype",
        nargs="+",
        default=["auto"],
        choices=("auto", "int8", "fp8"),
        help="dtype of the cache (default: auto, as --dtype)",
    )


def add_engine_flags(parser: argparse.ArgumentParser, *, default_mode: str) -> None:
    """Add the flags of how steps run; `default_mode` is what `--help` says of the default."""
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=MODES,
        help=f"how steps run (default: {default_mode})",
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=["auto"],
        choices=("auto", "native", "torch"),
        help="native: C++ operators on a CPU, Triton kernels on CUDA; torch: plain PyTorch around"
        " the paged attention operation; auto: native, but torch with --mode eager (default: auto)",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=positive_integer,
        default=EngineConfig().prefill_chunk,
        metavar="TOKENS",
        help="prompt tokens of one step at most (default: %(default)s)",
    )
