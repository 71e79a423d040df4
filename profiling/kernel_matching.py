"""Assigns the nodes of a captured step to the kernels of a replay.

Kernels are matched by graph node id where both the trace and the names have it, else by order and
name: a replay in one stream runs its nodes in capture order. If kernels are missing from the trace,
or some are not in the graph, a longest common subsequence aligns the two (Hunt & McIlroy 1976). A
kernel gets a node only if *every* longest alignment agrees: all layers have the same kernel names,
so a single alignment among several would be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .kernel_names import KernelNames, Node, StepNodes

__all__ = ["DeviceWork", "find_step", "function_name", "match", "match_work"]

MOST_CELLS = 1_000_000
"""Sequences are aligned up to this product of their lengths: about a second."""


class DeviceWork(NamedTuple):
    """A kernel, a copy or a fill of a replay."""

    kind: str
    """"kernel", "memcpy" or "memset"."""
    name: str
    """Of the kernel."""
    node_id: int | None
    """Graph node id, where the trace has it."""


def match(
    nodes: Sequence[Node],
    kernel_names: Sequence[str | None],
    tools_ids: Sequence[int | None] | None = None,
) -> list[Node | None]:
    """Return for each kernel of one replay its node, or None where that is not certain.

    Args:
        nodes: of the step (`StepNodes.nodes`); those that are no kernels are passed over.
        kernel_names: of the kernels of one replay in the order in which they ran, mangled or not;
            None: unknown.
        tools_ids: the graph node id of each, where the trace has it.

    A node is never given to a kernel of another name.
    """
    kernels = [node for node in nodes if node.kind == "kernel"]
    ids = [None] * len(kernel_names) if tools_ids is None else list(tools_ids)
    if len(ids) != len(kernel_names):
        raise ValueError(f"{len(ids)} tools_ids for {len(kernel_names)} kernels")
    by_id = {node.tools_id: node for node in kernels if node.tools_id is not None}
    if by_id and any(tools_id in by_id for tools_id in ids):
        # The ids of one executable graph: a kernel without one of them is of another graph.
        found = [by_id.get(tools_id) if tools_id is not None else None for tools_id in ids]
        return [
            node if node is not None and _agree(node.kernel, name) else None
            for node, name in zip(found, kernel_names, strict=True)
        ]
    indices = _align(tuple(node.kernel for node in kernels), tuple(kernel_names))
    return [None if index is None else kernels[index] for index in indices]


def find_step(
    names: KernelNames,
    phase: str,
    size: int | None,
    kernel_names: Sequence[str | None],
    tools_ids: Sequence[int | None] | None = None,
) -> tuple[StepNodes, list[Node | None]] | None:
    """Return the captured step that a replay is most likely of, with its kernels matched.

    Steps that differ in what they read only have the same nodes: the first of equals is returned.

    Args:
        names: of all captured steps.
        phase: "decode" or "prefill".
        size: the bucket; None: any.
        kernel_names: as `match`.
        tools_ids: as `match`.

    Returns:
        None if no step of that phase and size has nodes, or no kernel of the replay is in one.
    """
    best: tuple[StepNodes, list[Node | None]] | None = None
    most = (0, 0)
    for step in names.steps:
        if step.phase != phase or (size is not None and step.size != size):
            continue
        matched = match(step.nodes, kernel_names, tools_ids)
        count = sum(node is not None for node in matched)
        score = (count, -abs(len(step.kernels) - len(kernel_names)))
        if count and (best is None or score > most):
            best, most = (step, matched), score
    return best


def match_work(
    names: KernelNames, phase: str, size: int | None, work: Sequence[DeviceWork]
) -> tuple[StepNodes, list[Node | None]] | None:
    """Return what `find_step` does, with copies and fills matched as well.

    Copies and fills have no names: they are matched by id, else by order where none is missing.

    Args:
        names: of all captured steps.
        phase: "decode" or "prefill".
        size: the bucket; None: any.
        work: of one replay, in the order in which it ran.
    """
    kernels = [one for one in work if one.kind == "kernel"]
    ids = [one.node_id for one in kernels]
    found = find_step(names, phase, size, [one.name for one in kernels], ids)
    if found is None:
        return None
    step, matched = found
    nodes_of_kind: dict[str, list[Node | None]] = {"kernel": matched}
    for kind in {one.kind for one in work} - {"kernel"}:
        own = [one for one in work if one.kind == kind]
        nodes = [node for node in step.nodes if node.kind == kind]
        by_id: dict[int | None, Node] = {node.tools_id: node for node in nodes}
        by_id.pop(None, None)
        if by_id:
            nodes_of_kind[kind] = [by_id.get(one.node_id) for one in own]
        else:
            nodes_of_kind[kind] = [*nodes] if len(nodes) == len(own) else [None] * len(own)
    left = {kind: iter(nodes) for kind, nodes in nodes_of_kind.items()}
    return step, [next(left[one.kind]) for one in work]


def _agree(node: str | None, kernel: str | None) -> bool:
    """Whether the names may be of one function; an unknown name (None) may be any."""
    if node is None or kernel is None or node == kernel:
        return True
    if node.startswith("_Z") and kernel.startswith("_Z"):
        return False
    return function_name(node) == function_name(kernel)


@lru_cache(maxsize=64)
def _align(
    nodes: tuple[str | None, ...], kernels: tuple[str | None, ...]
) -> tuple[int | None, ...]:
    """Return the index of the node of each kernel. Kept: most replays of a step look the same."""
    if len(nodes) == len(kernels) and all(map(_agree, nodes, kernels)):
        return tuple(range(len(kernels)))  # of this length there is no other alignment
    unknown: tuple[int | None, ...] = (None,) * len(kernels)
    if len(nodes) * len(kernels) > MOST_CELLS:
        return unknown
    before = _common(nodes, kernels)
    behind = _common(nodes[::-1], kernels[::-1])
    longest = before[-1][-1]
    # A longest alignment has one pair of each rank: the length of what comes before the pair. So
    # what is alone in its rank is in all of them.
    of_rank: dict[int, list[tuple[int, int]]] = {}
    for i, node in enumerate(nodes):
        for j, kernel in enumerate(kernels):
            rank, rest = before[i][j], behind[len(nodes) - i - 1][len(kernels) - j - 1]
            if rank + 1 + rest == longest and _agree(node, kernel):
                of_rank.setdefault(rank, []).append((i, j))
    found = list(unknown)
    for pairs in of_rank.values():
        if len(pairs) == 1:
            ((i, j),) = pairs
            found[j] = i
    return tuple(found)


def _common(nodes: Sequence[str | None], kernels: Sequence[str | None]) -> list[list[int]]:
    """Return for each two beginnings the length of their longest common subsequence."""
    rows = [[0] * (len(kernels) + 1)]
    for node in nodes:
        above, row = rows[-1], [0]
        for j, kernel in enumerate(kernels):
            row.append(above[j] + 1 if _agree(node, kernel) else max(above[j + 1], row[j]))
        rows.append(row)
    return rows


_LENGTH = re.compile(r"L?(?P<length>\d{1,4})")


@lru_cache(maxsize=4096)
def function_name(name: str) -> str:
    """Return the name of a function without namespaces, template arguments and parameters.

    The driver has the mangled name of a C++ kernel, a trace the mangled, the full or the short one.

    >>> function_name("_ZN2at6native13reduce_kernelILi512ELi1EEEvT_")
    'reduce_kernel'
    >>> function_name("void at::native::(anonymous namespace)::fill<int, 4>(int*, int)")
    'fill'
    """
    if name.startswith("_Z"):
        return _mangled_base(name) or name
    depth, plain = 0, []
    text = name.replace("(anonymous namespace)", "anonymous")
    for position, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif depth == 0:
            if character == "(" and position:
                break
            plain.append(character)
    return "".join(plain).strip().rpartition("::")[2].rpartition(" ")[2] or name


def _mangled_base(name: str) -> str | None:
    """The last identifier of a mangled name before the first template arguments, or the end.

    `_Z`, `N` and identifiers behind their lengths, or one identifier (Itanium C++ ABI, "Mangling");
    `L` marks internal linkage.
    """
    nested = name.startswith("_ZN")
    position = 3 if nested else 2
    base: str | None = None
    while found := _LENGTH.match(name, position):
        start = found.end()
        position = start + int(found["length"])
        if position > len(name):
            return None
        base = name[start:position]
        if not nested:
            break
    return base
