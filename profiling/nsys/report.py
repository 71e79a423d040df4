"""The report of a profile: its steps, the distribution of their times, operations and layers.

Times are in µs. Standard library only.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..kernel_names import (
    OTHER,
    SUFFIX,
    DeviceWork,
    KernelNames,
    Node,
    load,
    nodes_of_replay,
)
from ..roofline import floor_seconds
from ..stats import Summary, covered
from . import GraphTrace
from .export import Activity, read_export
from .steps import STEP_COLUMNS, TracedPart, TracedStep, traced_steps

__all__ = ["Case", "Change", "Part", "Report", "compare", "read_report"]

SCHEMA_VERSION: Final = 1

AROUND: Final = "around"
"""The phase of the device's work before and after the launches of a step: inputs, outputs."""

_PHASES: Final = ("decode", "verify", "prefill", AROUND)
_ADDED: Final = (
    "tokens", "padding", "host_us", "wait_us", "device_us", "busy_us", "gap_us", "launches",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """The `n` steps of one phase and bucket, and their times in µs; None: not known of any step."""

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
class Part:
    """An operation or a layer, over all launches of a phase.

    Attributes:
        phase: "decode", "verify", "prefill" or "around".
        layer: its number; None for an operation (of all layers).
        name: of the operation; of the kernel if no captured node matches; empty for a layer.
        named: whether the name is that of an operation of the model.
        activities: mean number of kernels, copies and fills per launch.
        us: their total time per launch in µs, over the launches that have them.
        share: of the device time of these launches. Shares add up to less than 1 if the device is
            idle between activities, to more if some overlap.
        fraction: of the roofline: bytes to read ÷ bandwidth ÷ time; None where unknown.
    """

    phase: str
    layer: int | None
    name: str
    named: bool
    activities: float
    us: Summary
    share: float
    fraction: float | None

    @property
    def label(self) -> str:
        """The name within its phase; kernel names are in brackets."""
        if self.layer is not None:
            return f"layer {self.layer}"
        return self.name if self.named else f"[{self.name}]"


@dataclass(frozen=True, slots=True)
class Report:
    """A profile.

    Attributes:
        trace: the export.
        graph_trace: how CUDA graphs were traced; None: none was.
        names: the file of kernel names, if there is one.
        known: the content of that file.
        steps: thread after thread, in order.
        cases: by phase and bucket.
        totals: sums over all steps by name, where any step has the value.
        operations: by phase, then the most expensive first.
        layers: by phase, then in order; empty without names.
        idle: by phase, the share of device time without any activity.
        notes: caveats about the numbers.
    """

    trace: Path
    graph_trace: GraphTrace | None
    names: Path | None
    known: KernelNames
    steps: list[TracedStep]
    cases: list[Case]
    totals: dict[str, float]
    operations: list[Part]
    layers: list[Part]
    idle: dict[str, float]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        known = self.known
        return {
            "schema_version": SCHEMA_VERSION,
            "trace": str(self.trace),
            "graph_trace": self.graph_trace,
            "names": None if self.names is None else str(self.names),
            "model": known.model,
            "device": known.device,
            "bandwidth_gb_s": known.bandwidth_gb_s,
            "notes": self.notes,
            "totals": self.totals,
            "cases": [asdict(case) for case in self.cases],
            "idle": self.idle,
            "operations": [asdict(part) for part in self.operations],
            "layers": [asdict(part) for part in self.layers],
            "steps": [{name: getattr(step, name) for name in STEP_COLUMNS} for step in self.steps],
        }


def read_report(trace: Path, names_path: Path | None = None) -> Report:
    """Read an export and the names of captured nodes, and summarise them.

    Args:
        trace: the export, NAME.sqlite.
        names_path: the file of names; None: NAME.kernels.json, if it exists.

    Raises:
        ExportError: see `export.read_export` and `steps.traced_steps`.
        NamesFileError: the file of names cannot be read, or is of another version.
    """
    default = trace.with_name(trace.stem + SUFFIX)
    path = default if names_path is None and default.exists() else names_path
    known = KernelNames() if path is None else load(path)
    export = read_export(trace)
    steps, notes = traced_steps(export)
    totals: dict[str, float] = {}
    for name in _ADDED:
        values = [getattr(step, name) for step in steps if getattr(step, name) is not None]
        if values:
            totals[name] = sum(values)
    tally = _Tally(known)
    for step in steps:
        tally.add(step)
    if tally.whole_graphs:
        notes.append(
            f"{tally.whole_graphs:,} launches were traced as whole graphs, so no operations of"
            " them: profile again with --graph-trace node"
        )
    if tally.activities and path is None:
        notes.append(
            "no names of captured nodes, so kernels go by their own: a profile of bench.py writes"
            f" them next to the trace (NAME{SUFFIX}), or give --names"
        )
    if tally.activities and path is not None and not tally.matched:
        notes.append(f"no kernel is one of a captured step of {path}: those of another engine?")
    return Report(
        trace=trace,
        graph_trace=export.graph_trace,
        names=path,
        known=known,
        steps=steps,
        cases=list(_cases(steps)),
        totals=totals,
        operations=tally.operations(),
        layers=tally.layers(),
        idle=tally.idle(),
        notes=notes,
    )


def _cases(steps: Iterable[TracedStep]) -> Iterator[Case]:
    groups: dict[tuple[str, int], list[TracedStep]] = defaultdict(list)
    for step in steps:
        groups[step.phase, -1 if step.bucket is None else step.bucket].append(step)
    for (phase, _), group in sorted(groups.items()):
        tokens = [step.tokens for step in group if step.tokens is not None]
        times = {}
        for name in ("step_us", "device_us", "gap_us", "host_us", "wait_us"):
            known = [getattr(step, name) for step in group if getattr(step, name) is not None]
            times[name] = Summary.of(known) if known else None
        bucket = group[0].bucket
        yield Case(phase, bucket, len(group), sum(tokens) if tokens else None, **times)


class _Key(NamedTuple):
    """Identifies a row of the report; of a layer the name is empty."""

    phase: str
    layer: int | None
    name: str
    named: bool


@dataclass(slots=True)
class _Phase:
    """Sums over the launches of a phase."""

    launches: int = 0
    steps: int = 0
    """Decode steps: a launch may run several."""
    device_ns: int = 0
    """From the first to the last activity of each launch."""
    busy_ns: float = 0.0
    """With an activity running."""


class _Tally:
    """Times of operations and layers, launch by launch.

    Kernels of a replayed graph carry no names but their own. `kernel_names` says which layer and
    operation each node of a captured step belongs to, and which node each kernel is.
    """

    def __init__(self, names: KernelNames) -> None:
        self._names = names
        self._phases: dict[str, _Phase] = defaultdict(_Phase)
        self._samples: dict[_Key, list[int]] = defaultdict(list)
        """For each launch that has the key, the time of its activities in ns."""
        self._counts: Counter[_Key] = Counter()
        """Activities of all launches."""
        self._layers_of: dict[str, set[int]] = defaultdict(set)
        """The layers that have an operation."""
        self.matched = self.activities = self.whole_graphs = 0

    def add(self, step: TracedStep) -> None:
        """Add the launches of a step, and what belongs to none of them."""
        for part in step.parts:
            timed = [activity for activity in part.activities if activity.is_timed]
            if any(activity.kind == "graph" for activity in timed):
                self.whole_graphs += 1
            elif timed:
                phase = self._phases[part.phase]
                phase.device_ns += max(a.end_ns for a in timed) - timed[0].start_ns
                phase.busy_ns += covered((a.start_ns, a.end_ns) for a in timed)
                nodes, steps = self._nodes(part)
                phase.steps += steps
                self._add_launch(part.phase, part.activities, nodes)
        if step.device_ns is not None and step.around:
            self._phases[AROUND].device_ns += step.device_ns[1] - step.device_ns[0]
            self._add_launch(AROUND, step.around, [None] * len(step.around))

    def _add_launch(
        self, phase: str, activities: Sequence[Activity], nodes: Sequence[Node | None]
    ) -> None:
        times: Counter[_Key] = Counter()
        for activity, node in zip(activities, nodes, strict=True):
            named = node is not None and node.operation != OTHER
            name = node.operation if node is not None and named else activity.name
            keys = [_Key(phase, None, name, named)]
            if node is not None and node.layer is not None:
                keys.append(_Key(phase, node.layer, "", named=True))
                self._layers_of[node.operation].add(node.layer)
            for key in keys:
                times[key] += max(0, activity.end_ns - activity.start_ns)
                self._counts[key] += 1
            self.activities += phase != AROUND
            self.matched += named
        self._phases[phase].launches += 1
        for key, ns in times.items():
            self._samples[key].append(ns)

    def _nodes(self, part: TracedPart) -> tuple[Sequence[Node | None], int]:
        """Return the node of each activity, and how many decode steps the part runs."""
        work = [DeviceWork(a.kind, a.name, a.node_id) for a in part.activities]
        found = nodes_of_replay(self._names, work, part.numbers.get("bucket"))
        return ([None] * len(work), 1) if found is None else (found[1], found[0].steps)

    def operations(self) -> list[Part]:
        """Return the operations by phase, the most expensive first."""
        read: Counter[str] = Counter()
        for cost in self._names.costs:
            read[cost.operation] += cost.launches * cost.bytes
        keys = [key for key in self._samples if key.layer is None]
        keys.sort(key=lambda key: (_PHASES.index(key.phase), -sum(self._samples[key]), key.name))
        return [self._part(key, read[key.name] if key.named else 0) for key in keys]

    def layers(self) -> list[Part]:
        """Return the layers in order. The bytes of an operation are spread over them evenly."""
        read: Counter[int | None] = Counter()
        for cost in self._names.costs:
            layers = self._layers_of.get(cost.operation, set())
            for layer in layers:
                read[layer] += cost.launches * cost.bytes // len(layers)
        keys = sorted(key for key in self._samples if key.layer is not None)
        return [self._part(key, read[key.layer]) for key in keys]

    def _part(self, key: _Key, read: int) -> Part:
        """Return a row; `read` is in bytes per decode step."""
        phase = self._phases[key.phase]
        total_ns = sum(self._samples[key])
        bandwidth, fraction = self._names.bandwidth_gb_s, None
        if key.phase == "decode" and read and total_ns and bandwidth is not None:
            floor = floor_seconds(read, 1e9 * bandwidth)
            fraction = floor * phase.steps / (total_ns / 1e9)
        return Part(
            *key,
            self._counts[key] / phase.launches,
            Summary.of(ns / 1e3 for ns in self._samples[key]),
            total_ns / phase.device_ns if phase.device_ns else 0.0,
            fraction,
        )

    def idle(self) -> dict[str, float]:
        """Return by phase the share of device time in which no activity ran."""
        return {
            name: 1 - phase.busy_ns / phase.device_ns
            for name, phase in sorted(self._phases.items())
            if name != AROUND and phase.device_ns
        }


@dataclass(frozen=True, slots=True)
class Change:
    """A median in two profiles.

    Attributes:
        what: "step", "operation" or "layer".
        phase: of the steps.
        label: the time and the bucket; or the operation; or the layer.
        old_us, new_us: medians in µs; None where a profile does not have it.
        old_n, new_n: numbers of samples.
    """

    what: str
    phase: str
    label: str
    old_us: float | None
    new_us: float | None
    old_n: int
    new_n: int

    @property
    def ratio(self) -> float | None:
        """New over old; None where one is missing or the old one is 0."""
        return self.new_us / self.old_us if self.new_us is not None and self.old_us else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the ratio by name."""
        return {**asdict(self), "ratio": self.ratio}


def compare(new: Report, old: Report) -> list[Change]:
    """Return what changed from `old` to `new`: steps, operations, then layers."""
    before, after = _medians(old), _medians(new)
    order = ("step", "operation", "layer")
    keys = sorted({**after, **before}, key=lambda key: order.index(key[0]))
    changes = []
    for key in keys:
        old_us, old_n = before.get(key, (None, 0))
        new_us, new_n = after.get(key, (None, 0))
        changes.append(Change(*key, old_us, new_us, old_n, new_n))
    return changes


def _medians(report: Report) -> dict[tuple[str, str, str], tuple[float, int]]:
    """Return medians in µs and their samples by what, phase and label."""
    found: dict[tuple[str, str, str], tuple[float, int]] = {}
    for time in ("step", "device", "gap", "host"):
        for case in report.cases:
            summary = getattr(case, f"{time}_us")
            label = time if case.bucket is None else f"{time}, bucket {case.bucket}"
            if summary is not None:
                found["step", case.phase, label] = summary.p50, summary.n
    for part in (*report.operations, *report.layers):
        what = "operation" if part.layer is None else "layer"
        found[what, part.phase, part.label] = part.us.p50, part.us.n
    return found
