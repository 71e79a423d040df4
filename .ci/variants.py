"""Times variants of a decode step that decide what is worked on next, each paired with the default.

    python .ci/variants.py --model preset:llama-3.2-1b --json FILE

    bounded    weights above 24 MiB: each program prefetches its share of 24 MiB, instead of nothing
    ahead      attention prefetches the next two weights instead of one
    both       bounded and ahead
    wide       gate and up in tiles of 8 x 512
    wide both  wide, bounded and ahead

The kernels of a variant are first checked against their references. Two engines then decode the
same prompt in turns, one with the default kernels. Prefetching must not change a token; other tiles
sum in another order. FILE is a list of {variant, us, default_us, n, ratios, tokens_equal, wrong},
rewritten after each variant. --dry-run: checks in Triton's interpreter, and the times of eager
steps on a CPU, which mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.bench.scenarios.steady import BenchmarkCase, CaseRun
from stepgraph.runtime.kernels.triton import layer_kernels, linear, tuning
from stepgraph.runtime.kernels.triton.linear import LinearConfig
from stepgraph.runtime.loading.loader import resolve_source
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.tools.verify_kernels import check_operations

WIDE = LinearConfig(block_n=8, block_k=512)
VARIANTS: dict[str, dict[str, bool]] = {
    "bounded": {"bounded": True},
    "ahead": {"ahead": True},
    "both": {"bounded": True, "ahead": True},
    "wide": {"wide": True},
    "wide both": {"wide": True, "bounded": True, "ahead": True},
}
CHECKED = ("gate_up", "down", "head", "decode_attention")
TURNS = 4


@contextlib.contextmanager
def variant(*, bounded: bool = False, ahead: bool = False, wide: bool = False) -> Iterator[None]:
    """Choose other sizes for what is captured in this block."""
    default, weights = linear.default_config, layer_kernels.WEIGHTS_AHEAD

    def chosen(
        kernel: str, rows: int, n: int, k: int, weight_bytes: int, *args: Any, **keywords: Any
    ) -> LinearConfig:
        config = default(kernel, rows, n, k, weight_bytes, *args, **keywords)
        if wide and kernel == "gate_up" and config.kind == "few_rows":
            config = dataclasses.replace(config, block_n=WIDE.block_n, block_k=WIDE.block_k)
        if bounded and config.kind == "few_rows":
            budget = linear.PREFETCH_BUDGET
            config = linear.bounded_prefetch(config, kernel, n, k, weight_bytes, budget)
        return config

    tuning.default_config = chosen
    layer_kernels.WEIGHTS_AHEAD = 2 if ahead else weights
    tuning.reload()
    try:
        yield
    finally:
        tuning.default_config, layer_kernels.WEIGHTS_AHEAD = default, weights
        tuning.reload()


def wrong_kernels(model: str, config: EngineConfig) -> list[str]:
    """Return what a check of the kernels under the current variant says of wrong ones."""
    native = resolve_source(model, config_only=True).native
    config = dataclasses.replace(config, mode="eager", kernels="auto", num_blocks=None)
    resolved = ResolvedConfig.resolve(config, native)
    checks = check_operations(
        native, resolved, rows=1, context=min(200, resolved.max_model_len or 200),
        replays=20, kernels=CHECKED,
    )  # fmt: skip
    return [str(check) for check in checks if not check.passed]


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="preset:llama-3.2-1b")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    case = BenchmarkCase(1, 24, 9) if options.dry_run else BenchmarkCase(1, 1024, 129)
    chunk = EngineConfig().prefill_chunk
    length = case.longest_sequence(chunk)
    config = EngineConfig(
        device="cpu" if options.dry_run else "cuda",
        mode="eager" if options.dry_run else "graph",
        kernels="torch" if options.dry_run else "native",
        max_num_seqs=1,
        max_model_len=length,
        num_blocks=2 + 2 * -(-length // EngineConfig().block_size),
        prefix_cache=False,
    )
    found: list[dict[str, Any]] = []
    with Engine.from_pretrained(options.model, config, progress=False) as default:
        base = CaseRun(default, case, seed=0)
        base.warm_up()
        for name, switches in VARIANTS.items():
            with variant(**switches):
                wrong = wrong_kernels(options.model, config)
                engine = Engine.from_pretrained(options.model, config, progress=False)
            with engine:
                run = CaseRun(engine, case, seed=0)
                run.warm_up()
                turns = len(base.repetitions)
                for _ in range(1 if options.dry_run else TURNS):
                    base.repeat()
                    run.repeat()
            pairs = zip(run.repetitions, base.repetitions[turns:], strict=True)
            theirs = [ms for repetition in base.repetitions[turns:] for ms in repetition]
            found.append(
                {
                    "variant": name,
                    "us": 1e3 * statistics.median(run.step_ms),
                    "default_us": 1e3 * statistics.median(theirs),
                    "n": len(run.step_ms),
                    "ratios": [statistics.median(a) / statistics.median(b) for a, b in pairs],
                    "tokens_equal": run.token_ids == base.token_ids,
                    "wrong": wrong,
                }
            )
            print(json.dumps(found[-1]), flush=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    changed = [e for e in found if not e["tokens_equal"] and "wide" not in e["variant"]]
    return int(any(entry["wrong"] for entry in found) or bool(changed))


if __name__ == "__main__":
    sys.exit(main())
