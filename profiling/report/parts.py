"""What the steps of a profile are made of: time by operation and by layer.

Kernels of a replayed graph carry no names but their own. `kernel_names` says which layer and
operation each node of a captured step belongs to, `kernel_matching` which node each kernel of a
replay is; here the times of kernels become times of operations. Standard library only.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..kernel_matching import find_step
from ..kernel_names import OTHER, KernelNames, Node
from ..roofline import floor_seconds
from ..stats import Summary
from .traced_steps import TracedLaunch, TracedStep, covered_ns

__all__ = ["AROUND", "Part", "StepParts", "step_parts"]

AROUND: Final = "around"
"""The phase of what the device does before and behind the launches of a step: inputs, outputs."""

_ORDER: Final = ("decode", "prefill", AROUND)


@dataclass(frozen=True, slots=True)
class Part:
    """An operation or a layer, over all launches of a phase.

    Attributes:
        phase: "decode", "prefill" or `AROUND`.
        name: of the operation; or of the kernel, for one that no captured node could be found for.
        layer: its number; None for an operation (of all layers).
        named: whether the name is that of an operation of the model.
        activities: kernels, copies and fills in a launch, on average.
        us: what its activities take in a launch, in µs, over the launches of the phase that have
            it.
        share: of the device time of these launches together. Shares add up to less than 1 where
            the device is idle between activities, to more where some run at the same time.
        fraction: of the roofline: bytes that it must read ÷ bandwidth ÷ time; None where the names
            do not say what it reads.
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
        """What tells it from others of its phase; the name of a kernel is in brackets."""
        if self.layer is not None:
            return f"layer {self.layer}"
        return self.name if self.named else f"[{self.name}]"


@dataclass(frozen=True, slots=True)
class StepParts:
    """The two tables, and how much of the launches could be named.

    Attributes:
        operations: by phase, then the most expensive first.
        layers: by phase, then in their order; empty without names.
        idle: by phase the share of device time in which no activity ran.
        matched: activities that were given a layer or an operation.
        activities: of all launches of which single activities were traced.
        whole_graphs: launches that were traced as a whole graph only.
    """

    operations: tuple[Part, ...]
    layers: tuple[Part, ...]
    idle: dict[str, float]
    matched: int
    activities: int
    whole_graphs: int


def step_parts(steps: Iterable[TracedStep], names: KernelNames | None) -> StepParts:
    """Divide the device time of steps among operations and layers."""
    tally = _Tally(names)
    for step in steps:
        for launch in step.launches:
            tally.take(launch)
        tally.take_around(step)
    return StepParts(
        tuple(tally.operations()),
        tuple(tally.layers()),
        tally.idle(),
        tally.matched,
        tally.activities,
        tally.whole_graphs,
    )


class _Tally:
    """Sums over launches."""

    def __init__(self, names: KernelNames | None) -> None:
        self._names = names
        self._operations = _Sums()
        self._layers = _Sums()
        self._device_ns: Counter[str] = Counter()
        self._busy_ns: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()
        """Decode steps, of which a launch may run several."""
        self._launches: Counter[str] = Counter()
        self._layers_of: dict[str, set[int]] = defaultdict(set)
        """The layers in which an operation was seen."""
        self.matched = self.activities = self.whole_graphs = 0

    def take(self, launch: TracedLaunch) -> None:
        """Add a launch."""
        timed = [a for a in launch.activities if a.end_ns >= a.start_ns > 0]
        if not timed:
            return
        if any(activity.kind == "graph" for activity in timed):
            self.whole_graphs += 1
            return
        nodes, several = self._nodes(launch)
        self._begin(launch.phase, several)
        self._device_ns[launch.phase] += max(a.end_ns for a in timed) - timed[0].start_ns
        self._busy_ns[launch.phase] += covered_ns(timed)
        for activity, node in zip(launch.activities, nodes, strict=True):
            self.activities += 1
            ns = max(0, activity.end_ns - activity.start_ns)
            named = node is not None and node.operation != OTHER
            self.matched += named
            if node is not None and named:
                self._operations.add((launch.phase, None, node.operation, True), ns)
            else:
                self._operations.add((launch.phase, None, activity.name, False), ns)
            if node is not None and node.layer is not None:
                self._layers.add((launch.phase, node.layer, "", True), ns)
                self._layers_of[node.operation].add(node.layer)

    def take_around(self, step: TracedStep) -> None:
        """Add what belongs to no launch of a step; its share is that of the step."""
        if step.device_ns is None or not step.around:
            return
        self._begin(AROUND, 1)
        self._device_ns[AROUND] += step.device_ns
        for activity in step.around:
            ns = max(0, activity.end_ns - activity.start_ns)
            self._operations.add((AROUND, None, activity.name, False), ns)

    def _begin(self, phase: str, several: int) -> None:
        self._launches[phase] += 1
        self._steps[phase] += several
        self._operations.begin()
        self._layers.begin()

    def _nodes(self, launch: TracedLaunch) -> tuple[Sequence[Node | None], int]:
        """The node of each activity, and how many decode steps the launch runs."""
        unknown: list[Node | None] = [None] * len(launch.activities)
        if self._names is None:
            return unknown, 1
        kernels = [i for i, a in enumerate(launch.activities) if a.kind == "kernel"]
        found = find_step(
            self._names,
            launch.phase,
            launch.numbers.get("bucket"),
            [launch.activities[i].name for i in kernels],
            [launch.activities[i].node_id for i in kernels],
        )
        if found is None:
            return unknown, 1
        step, nodes = found
        for index, node in zip(kernels, nodes, strict=True):
            unknown[index] = node
        by_id = {node.tools_id: node for node in step.nodes if node.tools_id is not None}
        for index, activity in enumerate(launch.activities):
            if activity.kind != "kernel" and activity.node_id is not None:
                unknown[index] = by_id.get(activity.node_id)
        return unknown, step.steps

    def operations(self) -> Iterator[Part]:
        """The operations, the most expensive of a phase first."""
        bytes_of: Counter[str] = Counter()
        for cost in self._names.costs if self._names is not None else ():
            bytes_of[cost.operation] += cost.launches * cost.bytes
        for key, samples, count in sorted(
            self._operations.items(),
            key=lambda item: (_ORDER.index(item[0][0]), -sum(item[1]), item[0][2]),
        ):
            phase, _, name, named = key
            read = bytes_of.get(name, 0) if phase == "decode" and named else 0
            yield self._part(key, samples, count, read)

    def layers(self) -> Iterator[Part]:
        """The layers in their order. What an operation reads is spread over its layers evenly."""
        bytes_of: Counter[int] = Counter()
        for cost in self._names.costs if self._names is not None else ():
            layers = self._layers_of.get(cost.operation, set())
            for layer in layers:
                bytes_of[layer] += cost.launches * cost.bytes // len(layers)
        for key, samples, count in sorted(self._layers.items(), key=lambda item: item[0][:2]):
            phase, number, _, _ = key
            read = bytes_of[number] if phase == "decode" and number is not None else 0
            yield self._part(key, samples, count, read)

    def _part(
        self, key: tuple[str, int | None, str, bool], samples: Sequence[int], count: int, read: int
    ) -> Part:
        """A row: `read` bytes a decode step."""
        phase, layer, name, named = key
        total_ns = sum(samples)
        fraction = None
        if read and total_ns and self._names is not None and self._names.bandwidth_gb_s is not None:
            floor = floor_seconds(read, 1e9 * self._names.bandwidth_gb_s)
            fraction = floor * self._steps[phase] / (total_ns / 1e9)
        device_ns = self._device_ns[phase]
        return Part(
            phase,
            name,
            layer,
            named,
            count / self._launches[phase],
            Summary.of(ns / 1e3 for ns in samples),
            total_ns / device_ns if device_ns else 0.0,
            fraction,
        )

    def idle(self) -> dict[str, float]:
        """The share of the device time of launches in which nothing ran."""
        return {
            phase: 1 - busy / self._device_ns[phase]
            for phase, busy in sorted(self._busy_ns.items())
            if self._device_ns[phase]
        }


class _Sums:
    """For each key the time of its activities in every launch that has it."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int | None, str, bool], list[int]] = defaultdict(list)
        self._launch: dict[tuple[str, int | None, str, bool], int] = {}
        self._counts: Counter[tuple[str, int | None, str, bool]] = Counter()
        self._current = 0

    def begin(self) -> None:
        """What is added from now on belongs to another launch."""
        self._current += 1

    def add(self, key: tuple[str, int | None, str, bool], ns: int) -> None:
        """Add an activity of the current launch."""
        self._counts[key] += 1
        samples = self._samples[key]
        if self._launch.get(key) == self._current:
            samples[-1] += ns
        else:
            self._launch[key] = self._current
            samples.append(ns)

    def items(self) -> Iterator[tuple[tuple[str, int | None, str, bool], list[int], int]]:
        """Keys with their samples in ns, and their activities in all launches."""
        for key, samples in self._samples.items():
            yield key, samples, self._counts[key]
