"""The report of a profile as data: its steps, their distribution and their parts.

Times are in µs. Standard library only.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from ..kernel_names import SUFFIX, KernelNames, load
from ..stats import Summary
from .assembly import traced_steps
from .export import read_export
from .parts import StepParts, step_parts
from .traced_steps import TracedStep

__all__ = ["STEP_COLUMNS", "Case", "Report", "StepRow", "names_beside", "read_report"]

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of the table of steps; times in µs, None where the profile does not tell.

    What each column says is in docs/profiling.md, "Reading the report".
    """

    thread: int
    step: int | None
    phase: str
    rows: int | None
    bucket: int | None
    tokens: int | None
    padding: int | None
    blocks_in_use: int | None
    host_us: float
    wait_us: float
    plan_us: float
    launch_us: float
    commit_us: float
    device_us: float | None
    busy_us: float | None
    gap_us: float | None
    step_us: float | None
    launches: int

    @classmethod
    def of(cls, step: TracedStep, thread: int) -> "StepRow":
        """Return the row of a step.

        Args:
            step: the step.
            thread: which of the threads of the profile ran it, from 0.
        """
        return cls(
            thread=thread,
            step=step.number,
            phase=step.phase,
            rows=step.sum_of("rows"),
            bucket=step.first_of("bucket"),
            tokens=step.sum_of("tokens"),
            padding=step.sum_of("padding"),
            blocks_in_use=step.first_of("blocks_in_use"),
            host_us=step.host_ns / 1e3,
            wait_us=step.wait_ns / 1e3,
            plan_us=step.plan_ns / 1e3,
            launch_us=step.launch_ns / 1e3,
            commit_us=step.commit_ns / 1e3,
            device_us=_us(step.device_ns),
            busy_us=_us(step.busy_ns),
            gap_us=_us(step.gap_ns),
            step_us=_us(step.step_ns),
            launches=step.calls,
        )


_ADDED: Final = (
    "tokens", "padding", "host_us", "wait_us", "device_us", "busy_us", "gap_us", "launches",
)  # fmt: skip
_SUMMARISED: Final = ("step_us", "device_us", "gap_us", "host_us", "wait_us")


@dataclass(frozen=True, slots=True)
class Case:
    """The steps of one phase and bucket: how many, and the distribution of their times.

    A time that no step has is None.
    """

    phase: str
    bucket: int | None
    n: int
    tokens: int | None
    step_us: Summary | None
    device_us: Summary | None
    gap_us: Summary | None
    host_us: Summary | None
    wait_us: Summary | None


@dataclass(frozen=True, slots=True)
class Report:
    """All that is reported of a profile.

    Attributes:
        trace: the export.
        graph_trace: how CUDA graphs were traced; None: none was.
        names: the file of the names of captured nodes; None: there is none.
        model, device, bandwidth_gb_s: what that file says.
        steps: thread after thread, in order.
        cases: by phase and bucket.
        totals: the times, tokens and launches of all steps by name; without those of which no step
            has any.
        parts: operations and layers.
        notes: what a reader must know about the numbers.
    """

    trace: Path
    graph_trace: Literal["graph", "node"] | None
    names: Path | None
    model: str
    device: str
    bandwidth_gb_s: float | None
    steps: tuple[StepRow, ...]
    cases: tuple[Case, ...]
    totals: dict[str, float]
    parts: StepParts
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "trace": str(self.trace),
            "graph_trace": self.graph_trace,
            "names": None if self.names is None else str(self.names),
            "model": self.model,
            "device": self.device,
            "bandwidth_gb_s": self.bandwidth_gb_s,
            "notes": list(self.notes),
            "totals": self.totals,
            "cases": [asdict(case) for case in self.cases],
            "idle": self.parts.idle,
            "operations": [asdict(part) for part in self.parts.operations],
            "layers": [asdict(part) for part in self.parts.layers],
            "steps": [asdict(row) for row in self.steps],
        }


STEP_COLUMNS: Final = tuple(field.name for field in fields(StepRow))
"""The columns of `--csv`, in order."""


def names_beside(trace: Path) -> Path | None:
    """Return the file of kernel names that stands beside NAME.sqlite, if there is one."""
    path = trace.with_name(trace.stem + SUFFIX)
    return path if path.exists() else None


def read_report(trace: Path, names_path: Path | None = None) -> Report:
    """Read an export and the names of captured nodes, and summarise them.

    Args:
        trace: the export.
        names_path: the file of names; None: the one beside the export, if there is one.

    Raises:
        ExportError: see `export.read_export` and `assembly.traced_steps`.
        NamesFileError: the file of names cannot be read, or is of another version.
    """
    path = names_path if names_path is not None else names_beside(trace)
    names = load(path) if path is not None else None
    traced = traced_steps(read_export(trace))
    threads = {thread: i for i, thread in enumerate(sorted({s.thread for s in traced.steps}))}
    rows = tuple(StepRow.of(step, threads[step.thread]) for step in traced.steps)
    parts = step_parts(traced.steps, names)
    known = names or KernelNames()
    return Report(
        trace=trace,
        graph_trace=traced.graph_trace,
        names=path,
        model=known.model,
        device=known.device,
        bandwidth_gb_s=known.bandwidth_gb_s,
        steps=rows,
        cases=tuple(_cases(rows)),
        totals=_totals(rows),
        parts=parts,
        notes=(*traced.notes, *_notes(parts, path)),
    )


def _notes(parts: StepParts, names: Path | None) -> Iterable[str]:
    """What is to be said of the parts of steps."""
    if parts.whole_graphs:
        yield (
            f"{parts.whole_graphs:,} launches were traced as whole graphs, so no operations of"
            " them: profile again with --graph-trace node"
        )
    if parts.activities and names is None:
        yield (
            "no names of captured nodes, so kernels go by their own: a profile of bench.py writes"
            f" them beside the trace (NAME{SUFFIX}), or give --names"
        )
    if names is not None and parts.activities and not parts.matched:
        yield f"no kernel is one of a captured step of {names}: those of another engine?"


def _totals(rows: Iterable[StepRow]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        for name in _ADDED:
            value = getattr(row, name)
            if value is not None:
                totals[name] = totals.get(name, 0) + value
    return totals


def _cases(rows: Iterable[StepRow]) -> Iterable[Case]:
    groups: dict[tuple[str, int], list[StepRow]] = defaultdict(list)
    for row in rows:
        groups[row.phase, -1 if row.bucket is None else row.bucket].append(row)
    for phase, bucket in sorted(groups):
        group = groups[phase, bucket]
        tokens = [row.tokens for row in group if row.tokens is not None]
        summaries = {name: _summary(getattr(row, name) for row in group) for name in _SUMMARISED}
        yield Case(
            phase=phase,
            bucket=group[0].bucket,
            n=len(group),
            tokens=sum(tokens) if tokens else None,
            **summaries,
        )


def _summary(values: Iterable[float | None]) -> Summary | None:
    known = [value for value in values if value is not None]
    return Summary.of(known) if known else None


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3
