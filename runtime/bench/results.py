"""The benchmark's JSON document, and what is printed of it: tables and warnings."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shlex
import string
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from ...profiling.command_line import aligned
from ...profiling.device_state import describe_throttling, driver_version
from ..engine.engine import Engine
from ..kernels import resolve_threads
from ..kernels.weights import MODEL
from .comparison import SCHEMA_VERSION, instruction_sets_text

Entry = Mapping[str, Any]
Cell = str | Callable[[Entry], str]
"""A format string over the fields of an entry (see `_Formatter`), or a function."""

MACHINE = "{device}, {threads} threads, reads {bandwidth_gb_s:.1f} GB/s (measured)"
"""A line about the environment of a document."""
SPREAD_LIMIT = 0.05
"""A case whose repetitions differ by more is warned about."""
BANDWIDTH_LIMIT = 0.1
"""So is a bandwidth that differs by more before and after the cases."""
_COMMIT = "STEPGRAPH_COMMIT"
"""The environment variable that names the commit, for a tree without a repository."""


def new_document(
    device: torch.device, bandwidth: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return a document without cases; `bandwidth` is measured, in bytes per second."""
    frequency = psutil.cpu_freq()
    cpu = _cpu_name()
    environment = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "driver": driver_version(device),
        "cpu": cpu,
        "cpu_mhz": None if frequency is None else round(frequency.current),
        "threads": resolve_threads(options.threads),
        "bandwidth_gb_s": bandwidth / 1e9,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": os.environ.get(_COMMIT) or _described_commit(),
        "command": shlex.join(options.command),
    }
    return {"schema_version": SCHEMA_VERSION, "environment": environment, "cases": []}


def settle_bandwidth(document: dict[str, Any], after: float) -> None:
    """Note the bandwidth measured after the cases; the larger one counts for their rooflines.

    Other work on the machine only lowers a measured bandwidth, which would flatter the fractions.
    """
    environment = document["environment"]
    before, after = environment["bandwidth_gb_s"], after / 1e9
    environment |= {"bandwidth_before_gb_s": before, "bandwidth_after_gb_s": after}
    if after <= before:
        return
    environment["bandwidth_gb_s"] = after
    for entry in _entries(document):
        if roofline := entry.get("roofline"):
            roofline["bandwidth_gb_s"] = after
            for name in ("floor_ms", "fraction"):
                roofline[name] *= before / after


def describe_engine(engine: Engine, model: str) -> dict[str, Any]:
    """Return the fields that entries of all engines begin with."""
    config, stats = engine.config, engine.stats()
    dtype, rounded = str(config.dtype).removeprefix("torch."), config.user.activation_dtype
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "model": model,
        "dtype": dtype,
        "weight_dtype": dtype if config.weights == MODEL else config.weights.name,
        "activation_dtype": dtype if rounded == "auto" else rounded,
        "kv_dtype": dtype if config.storage == "model" else config.storage,
        "mode": config.mode,
        "kernels": config.kernels,
        "model_impl": config.model_impl,
        "tensor_parallel": config.user.tensor_parallel,
        "device": str(config.device),
        "prefill_chunk": config.user.prefill_chunk,
        "threads": config.threads,
        "cpus": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        "instruction_sets": stats["instruction_sets"],
        "fallbacks": stats["fallbacks"],
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return f"{names[0]}, {len(names)} processors" if names else platform.machine()


def _described_commit() -> str | None:
    """Return the commit of the working tree with this file; None where there is none."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12")
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.check_output(
            command, cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.strip()


class _Formatter(string.Formatter):
    """Formats fields such as `{step_ms[p50]:.2f}`; a field that is null or absent is a dash.

    Additional formats: `dist` is p50 / p90 / p99, `MB` bytes in 10^6.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name, *keys = field_name.replace("]", "").split("[")
        value = kwargs.get(name)
        for key in keys:
            value = None if value is None else value.get(key)
        return value, name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "-"
        if format_spec == "dist":
            return " / ".join(self.format_field(value[p], ".2f") for p in ("p50", "p90", "p99"))
        if format_spec == "MB":
            return f"{value / 1e6:.1f}"
        return format(value, format_spec)


def _mode(entry: Entry) -> str:
    """Return the mode, and kernels and layers unless they are the usual ones."""
    found = [entry["mode"]]
    usual = "torch" if entry["mode"] == "eager" else "native"
    if entry.get("kernels", usual) != usual:
        found.append(entry["kernels"])
    if entry.get("model_impl") == "transformers":
        found.append("layers of transformers")
    if entry.get("tensor_parallel", 1) > 1:
        found.append(f"{entry['tensor_parallel']} ranks")
    return ", ".join(found)


def _check(entry: Entry) -> str:
    check = entry.get("check")
    return f"{check['tokens']} {'ok' if check['passed'] else 'FAILED'}" if check else "-"


_FORMATTER = _Formatter()
_KIND: dict[str, Cell] = {
    "model": "{model}",
    "dtype": "{dtype}",
    "weights": "{weight_dtype}",
    "activations": "{activation_dtype}",
    "KV": "{kv_dtype}",
    "mode": _mode,
    "output": "{output_len}",
}
"""Columns that are left out of a table, and stand above it, where all entries are equal."""
_TEXT_COLUMNS = {"model", "dtype", "weights", "activations", "KV", "mode"}
_ITL = "ITL ms p50 / p90 / p99"
_STEADY: dict[str, Cell] = {
    "batch": "{batch_size}",
    "input": "{input_len}",
    "busy": lambda entry: str(entry.get("neighbours") or "-"),
    "tok/s": "{tokens_per_second:.1f}",
    "roofline": "{roofline[fraction]:.0%}",
    "prefill tok/s": "{prefill_tokens_per_second:.0f}",
    "step ms p50 / p90 / p99": "{step_ms:dist}",
    "TTFT ms p50": "{ttft_ms[p50]:.1f}",
    "host µs": "{host_us[p50]:.0f}",
    "n": "{step_ms[n]}",
    "spread": "{spread:.1%}",
}
_VERBOSE: dict[str, Cell] = {
    _ITL: "{itl_ms:dist}",
    "MB/step": "{roofline[bytes_per_step]:MB}",
    "padding": "{padding:.0%}",
    "KV MB": "{kv_bytes:MB}",
}
_SERVE: dict[str, Cell] = {
    "max ITL ms": "{max_itl_ms:g}",
    "of capacity": "{fraction:g}",
    "req/s": "{rate:.2f}",
    "TTFT ms p50 / p90 / p99": "{ttft_ms:dist}",
    _ITL: "{itl_ms:dist}",
    "goodput/s": "{goodput:.2f}",
    "good": "{good} of {requests}",
    "shed": "{shed}",
    "missed": "{missed}",
    "failed": "{failed}",
    "unfinished": "{unfinished}",
    "SLO ms TTFT, ITL": "{slo_ttft_ms:.0f}, {slo_itl_ms:.0f}",
    "lag ms p99": "{lag_ms[p99]:.2f}",
}


def _optional(cases: Sequence[Entry]) -> dict[str, Cell]:
    """Return the columns that a table of steady has if a case has values for them."""

    def of(name: str, cell: str) -> Callable[[Entry], str]:
        def find(entry: Entry) -> str:
            found = [peer for peer in entry["baselines"] if peer["name"] == name]
            return _FORMATTER.vformat(cell, (), found[0]) if found else "-"

        return find

    columns: dict[str, Cell] = {"= eager": "{tokens_equal_eager:.0%}", "tokens checked": _check}
    for name in dict.fromkeys(peer["name"] for case in cases for peer in case["baselines"]):
        columns |= {
            f"{name} step ms p50 (n)": of(name, "{step_ms[p50]:.2f} ({step_ms[n]})"),
            f"times faster than {name}": of(name, "{speedup:.2f}"),
            f"{name} prefill tok/s": of(name, "{prefill_tokens_per_second:.0f}"),
            f"= {name}": of(name, "{tokens_equal:.0%}"),
        }
    return columns


def table_rows(document: Entry, *, verbose: bool = False) -> tuple[str, list[dict[str, str]]]:
    """Return what all entries of the document share, and the cells of the others by column."""
    entries, columns, optional = document.get("serve", ()), _KIND | _SERVE, {"max ITL ms"}
    if not entries:
        entries, found = document["cases"], _optional(document["cases"])
        columns = _KIND | _STEADY | (_VERBOSE if verbose else {}) | found
        optional = {"busy", *found}
    rows = [
        {
            head: _FORMATTER.vformat(cell, (), entry) if isinstance(cell, str) else cell(entry)
            for head, cell in columns.items()
        }
        for entry in entries
    ]
    values = {head: {row[head] for row in rows} for head in columns}
    shared = {h: min(v) for h, v in values.items() if h in _KIND and len(v) == 1}
    hidden = {h for h in optional if values[h] == {"-"}} | shared.keys()
    named = [
        f"{head} {value}" if head in ("weights", "KV", "output") else value
        for head, value in shared.items()
        if not (head in ("weights", "activations", "KV") and value == shared.get("dtype"))
    ]
    return ", ".join(named), [{h: row[h] for h in columns if h not in hidden} for row in rows]


def report(document: Entry, *, verbose: bool = False) -> str:
    """Return the table and the hardware, as Markdown."""
    shared, rows = table_rows(document, verbose=verbose)
    lines = [shared, ""] if shared else []
    environment = document["environment"]
    if rows:
        heads = list(rows[0])
        texts = len([*itertools.takewhile(_TEXT_COLUMNS.__contains__, heads)])
        lines += [*aligned(heads, [list(row.values()) for row in rows], texts), ""]
    for note in notes(document):
        lines += [*textwrap.wrap(note, 90), ""]
    lines.append(MACHINE.format_map(environment))
    if used := instruction_sets_text(_entries(document)):
        lines.append(f"instruction sets: {used}")
    lines.append("torch {torch}, Python {python}; {command}".format_map(environment))
    return "\n".join(lines)


def notes(document: Entry) -> list[str]:
    """Return what a reader must know of the numbers."""
    if all(case["roofline"]["fraction"] <= 1 for case in document["cases"]):
        return []
    return [
        "Above 100 %: what a step reads fits into the cache of the processor, which is faster than"
        " the memory that the bandwidth is measured on."
    ]


def warnings(document: Entry) -> list[str]:
    """Return a line for each kind of warning, and for each case that was throttled."""
    lines, cases, environment = failed_checks(document), document["cases"], document["environment"]
    noisy = [case for case in cases if (case["spread"] or 0.0) > SPREAD_LIMIT]
    if noisy:
        named = ", ".join(f"{_name(case)} ({case['spread']:.1%})" for case in noisy)
        lines.append(
            f"Warning: the repetitions of {len(noisy)} of {len(cases)} cases lie more than"
            f" {SPREAD_LIMIT:.0%} apart (spread): {named}"
        )
    before, after = (
        environment.get(f"bandwidth_{when}_gb_s", environment["bandwidth_gb_s"])
        for when in ("before", "after")
    )
    if max(before, after) > (1 + BANDWIDTH_LIMIT) * min(before, after):
        lines.append(
            f"Warning: memory was read at {before:.1f} GB/s before the cases and {after:.1f} after"
            " them: other work disturbed the machine; repeat this when it is idle"
        )
    for entry in _entries(document):
        state = entry.get("device_state")
        held = state and describe_throttling(state["before"], state["after"])
        if held:
            lines.append(f"Warning: {_name(entry)}: {held}")
    late = [e for e in document.get("serve", ()) if e.get("generator_behind")]
    if late:
        named = ", ".join(f"{e['fraction']:g} of capacity" for e in late)
        lines.append(
            "Warning: the load generator fell behind its schedule; latencies contain its own delay"
            f" (see lag): {named}"
        )
    return lines


def failed_checks(document: Entry) -> list[str]:
    """Return a line for each case whose tokens differ from the reference."""
    lines = []
    for case in document["cases"]:
        check = case.get("check")
        if check is not None and not check["passed"]:
            gap = "not finite" if check["worst_gap"] is None else f"{check['worst_gap']:.2g}"
            why = check["error"] or (
                f"a token's reference logit lies {gap} standard deviations below the largest,"
                f" {check['tolerance']:g} are allowed; {check['equal']} of {check['tokens']} tokens"
                " equal the reference's"
            )
            lines.append(f"FAILED: {_name(case)}: its times do not count: {why}")
    return lines


def _entries(document: Entry) -> Iterator[dict[str, Any]]:
    return itertools.chain.from_iterable(v for v in document.values() if isinstance(v, list))


def _name(entry: Entry) -> str:
    names = ("batch_size", "input_len", "output_len")
    sizes = " x ".join(str(entry[name]) for name in names if name in entry)
    dtypes = ("dtype", "weight_dtype", "activation_dtype", "kv_dtype")
    kind = dict.fromkeys(entry[name] for name in ("model", *dtypes))
    return f"{' '.join(kind)} {entry['mode']} {sizes}"
