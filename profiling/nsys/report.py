"""The report of a profile: its steps, the distribution of their times, operations and layers.

Times are in µs. Standard library only.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..kernel_matching import find_step
from ..kernel_names import OTHER, SUFFIX, KernelNames, Node, load
from ..roofline import floor_seconds
from ..stats import Summary
from . import GraphTrace
from .export import read_export
from .steps import STEP_COLUMNS, TracedPart, TracedStep, covered_ns, traced_steps

__all__ = ["Case", "Change", "Part", "Report", "compare", "read_report"]

SCHEMA_VERSION: Final = 1

AROUND: Final = "around"
"""The phase of the device's work before and after the launches of a step: inputs, outputs."""

_PHASES: Final = ("decode", "prefill", AROUND)
_ADDED: Final = (
    "tokens", "padding", "host_us", "wait_us", "device_us", "busy_us", "gap_us", "launches",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """The steps of one phase and bucket: how many, and their times; None: no step has that one."""

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
        phase: "decode", "prefill" or "around".
        name: of the operation; or of the kernel where no captured node was found for it.
        layer: its number; None for an operation (of all layers).
        named: whether the name is that of an operation of the model.
        activities: kernels, copies and fills in a launch, on average.
        us: their time in a launch, over the launches of the phase that have them.
        share: of the device time of these launches together. Shares add up to less than 1 where
            the device is idle between activities, to more where some run at the same time.
        fraction: of the roofline: bytes that it must read ÷ bandwidth ÷ time; None where unknown.
    """

    phase: str
    name: str
    layer: int | None
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
        names: the file of the names of captured nodes, if there is one.
        known: what that file says.
        steps: thread after thread, in order.
        cases: by phase and bucket.
        totals: times, tokens and launches of all steps by name, where any step has them.
        operations: by phase, then the most expensive first.
        layers: by phase, then in order; empty without names.
        idle: by phase the share of device time in which no activity ran.
        notes: what a reader must know about the numbers.
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
        return {
            "schema_version": SCHEMA_VERSION,
            "trace": str(self.trace),
            "graph_trace": self.graph_trace,
            "names": None if self.names is None else str(self.names),
            "model": self.known.model,
            "device": self.known.device,
            "bandwidth_gb_s": self.known.bandwidth_gb_s,
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


_Key = tuple[str, int | None, str, bool]
"""Phase, layer, name, named; of a layer the name is empty."""


class _Tally:
    """Times of operations and layers, launch by launch.

    Kernels of a replayed graph carry no names but their own. `kernel_names` says which layer and
    operation each node of a captured step belongs to, `kernel_matching` which node each kernel is.
    """

    def __init__(self, names: KernelNames) -> None:
        self._names = names
        self._samples: dict[_Key, list[int]] = defaultdict(list)
        """Of each launch that has it the time of its activities in ns."""
        self._counts: Counter[_Key] = Counter()
        self._device_ns: Counter[str] = Counter()
        self._busy_ns: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()
        """Decode steps: a launch may run several."""
        self._launches: Counter[str] = Counter()
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
                self._device_ns[part.phase] += max(a.end_ns for a in timed) - timed[0].start_ns
                self._busy_ns[part.phase] += covered_ns(timed)
                self._add_part(part)
        if step.device_ns is not None and step.around:
            self._device_ns[AROUND] += step.device_ns[1] - step.device_ns[0]
            times: Counter[_Key] = Counter()
            for activity in step.around:
                self._add_time(times, (AROUND, None, activity.name, False), activity)
            self._end(AROUND, times, 1)

    def _add_part(self, part: TracedPart) -> None:
        nodes, steps = self._nodes(part)
        times: Counter[_Key] = Counter()
        for activity, node in zip(part.activities, nodes, strict=True):
            self.activities += 1
            named = node is not None and node.operation != OTHER
            self.matched += named
            name = node.operation if node is not None and named else activity.name
            self._add_time(times, (part.phase, None, name, named), activity)
            if node is not None and node.layer is not None:
                self._add_time(times, (part.phase, node.layer, "", True), activity)
                self._layers_of[node.operation].add(node.layer)
        self._end(part.phase, times, steps)

    def _add_time(self, times: Counter[_Key], key: _Key, activity: Any) -> None:
        times[key] += max(0, activity.end_ns - activity.start_ns)
        self._counts[key] += 1

    def _end(self, phase: str, times: Counter[_Key], steps: int) -> None:
        self._launches[phase] += 1
        self._steps[phase] += steps
        for key, ns in times.items():
            self._samples[key].append(ns)

    def _nodes(self, part: TracedPart) -> tuple[Sequence[Node | None], int]:
        """The node of each activity, and how many decode steps the part runs."""
        nodes: list[Node | None] = [None] * len(part.activities)
        kernels = [i for i, a in enumerate(part.activities) if a.kind == "kernel"]
        found = find_step(
            self._names,
            part.phase,
            part.numbers.get("bucket"),
            [part.activities[i].name for i in kernels],
            [part.activities[i].node_id for i in kernels],
        )
        if found is None:
            return nodes, 1
        step, matched = found
        for index, node in zip(kernels, matched, strict=True):
            nodes[index] = node
        by_id = {node.tools_id: node for node in step.nodes if node.tools_id is not None}
        for index, activity in enumerate(part.activities):
            if activity.kind != "kernel" and activity.node_id is not None:
                nodes[index] = by_id.get(activity.node_id)
        return nodes, step.steps

    def operations(self) -> list[Part]:
        read: Counter[str] = Counter()
        for cost in self._names.costs:
            read[cost.operation] += cost.launches * cost.bytes
        keys = [key for key in self._samples if key[1] is None]
        keys.sort(key=lambda key: (_PHASES.index(key[0]), -sum(self._samples[key]), key[2]))
        return [self._part(key, read[key[2]] if key[3] else 0) for key in keys]

    def layers(self) -> list[Part]:
        """The layers in order. The bytes of an operation are spread over its layers evenly."""
        read: Counter[int | None] = Counter()
        for cost in self._names.costs:
            layers = self._layers_of.get(cost.operation, set())
            for layer in layers:
                read[layer] += cost.launches * cost.bytes // len(layers)
        keys = [key for key in self._samples if key[1] is not None]
        return [self._part(key, read[key[1]]) for key in sorted(keys, key=lambda key: key[:2])]

    def _part(self, key: _Key, read: int) -> Part:
        """A row; `read` bytes a decode step."""
        phase, layer, name, named = key
        total_ns, device_ns = sum(self._samples[key]), self._device_ns[phase]
        bandwidth, fraction = self._names.bandwidth_gb_s, None
        if phase == "decode" and read and total_ns and bandwidth is not None:
            floor = floor_seconds(read, 1e9 * bandwidth)
            fraction = floor * self._steps[phase] / (total_ns / 1e9)
        return Part(
            phase,
            name,
            layer,
            named,
            self._counts[key] / self._launches[phase],
            Summary.of(ns / 1e3 for ns in self._samples[key]),
            total_ns / device_ns if device_ns else 0.0,
            fraction,
        )

    def idle(self) -> dict[str, float]:
        busy = sorted(self._busy_ns.items())
        device = self._device_ns
        return {phase: 1 - ns / device[phase] for phase, ns in busy if device[phase]}


@dataclass(frozen=True, slots=True)
class Change:
    """A median in two profiles; None where one of them does not have it.

    Attributes:
        what: "step", "operation" or "layer".
        phase: of the steps.
        label: the time and the bucket; or the operation; or the layer.
        old_us, new_us: medians.
        old_n, new_n: their samples.
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
    keys = dict.fromkeys([*after, *before])
    order = ("step", "operation", "layer")
    changes = []
    for key in sorted(keys, key=lambda key: order.index(key[0])):
        was, now = before.get(key), after.get(key)
        changes.append(
            Change(
                *key,
                None if was is None else was.p50,
                None if now is None else now.p50,
                0 if was is None else was.n,
                0 if now is None else now.n,
            )
        )
    return changes


def _medians(report: Report) -> dict[tuple[str, str, str], Summary]:
    found: dict[tuple[str, str, str], Summary] = {}
    for time in ("step", "device", "gap", "host"):
        for case in report.cases:
            summary = getattr(case, f"{time}_us")
            label = time if case.bucket is None else f"{time}, bucket {case.bucket}"
            if summary is not None:
                found["step", case.phase, label] = summary
    for part in (*report.operations, *report.layers):
        what = "operation" if part.layer is None else "layer"
        found[what, part.phase, part.label] = part.us
    return found
