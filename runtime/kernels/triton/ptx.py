"""Analyses a kernel's PTX: its loads and stores, and its wait for earlier kernels.

The order rule of programmatic dependent launch is not checked at run time: a kernel loads the
results of earlier kernels after `griddepcontrol.wait`, writes nothing before it, and every program
executes it exactly once. Triton moves loads (its pipeliner hoisted dependent loads over a wait in a
loop: triton #11905), so the rule is checked on the compiled code instead of the source.

Addresses are traced from the parameters through the registers: a load belongs to each parameter
that its address may come from. Source of the syntax: PTX ISA, "Instruction Statements".
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["PtxSummary", "summarize_ptx"]

_COMMENT = re.compile(r"//.*|/\*.*?\*/")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.DOTALL)
_DIRECTIVE = re.compile(r"^[\s{}]*\.[^\n]*$", re.MULTILINE)
_SCOPE = "{} \t\n"
_LABEL = re.compile(r"([\w$]+):(?!:)")
_STATEMENT = re.compile(r"^(?:@!?(%[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_REGISTER = re.compile(r"%[\w$]+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_WIDTH = re.compile(r"(?:\.v(\d))?\.[a-z]+(\d+)$")

_EFFECTS = ("ld.", "st.", "cp.", "red.", "atom.", "bra")
"""Instructions that do more than compute a register from others."""

WAIT = "griddepcontrol.wait"
LAUNCH_DEPENDENTS = "griddepcontrol.launch_dependents"


@dataclass(frozen=True, slots=True)
class PtxSummary:
    """Memory order of one kernel. Parameters are numbered as in its PTX."""

    loads: dict[int, int]
    """Parameter -> bytes of a thread's widest load from it."""
    early_loads: frozenset[int]
    """Parameters loaded before the wait, except for values that only prefetches use, which may be
    stale. Empty without a wait."""
    stores: frozenset[int]
    """Parameters that the kernel writes to."""
    waits: int
    lets_dependents_start: bool
    faults: tuple[str, ...]
    """Violations of the order rule for any tensors; empty for a kernel without a wait."""


class _Statement(NamedTuple):
    opcode: str
    operands: str
    guard: str
    """The predicate register; empty: always executed."""


def summarize_ptx(ptx: str) -> PtxSummary:
    """Summarize the one kernel of a PTX file."""
    text = _COMMENT.sub("", ptx)
    entry = _ENTRY.search(text)
    if entry is None:
        raise ValueError("there is no kernel in this PTX")
    statements, labels = _statements(text[entry.end() :])
    sources = _pointer_sources(statements, entry.group(1), entry.group(2))

    waits = [i for i, s in enumerate(statements) if s.opcode == WAIT]
    first_wait = waits[0] if waits else 0
    used = _used_early(statements, first_wait)
    loads: dict[int, int] = defaultdict(int)
    early, stores = set[int](), set[int]()
    early_store = False
    for i, statement in enumerate(statements):
        address, width = _loaded(statement)
        for parameter in _sources_of(address, sources):
            loads[parameter] = max(loads[parameter], width)
            if i in used:
                early.add(parameter)
        address = _stored(statement)
        if address is not None:
            stores |= _sources_of(address, sources)
            early_store |= i < first_wait
    return PtxSummary(
        loads=dict(loads),
        early_loads=frozenset(early),
        stores=frozenset(stores),
        waits=len(waits),
        lets_dependents_start=any(s.opcode == LAUNCH_DEPENDENTS for s in statements),
        faults=_order_faults(statements, labels, waits, early_store),
    )


def _order_faults(
    statements: list[_Statement], labels: dict[str, int], waits: list[int], early_store: bool
) -> tuple[str, ...]:
    """Return the violations of the position of the wait."""
    if not waits:
        return ()
    wait, faults = waits[0], []
    if len(waits) > 1:
        faults.append(f"waits in {len(waits)} places")
    if early_store:
        faults.append("writes before it waits")
    if statements[wait].guard or any(s.opcode in ("ret", "exit") for s in statements[:wait]):
        faults.append("may end without having waited")
    for i, statement in enumerate(statements):
        target = labels.get(statement.operands.strip()) if "bra" in statement.opcode else None
        if target is None:
            continue
        if i < wait < target:
            faults.append("may skip the wait")
        if target <= wait < i:
            faults.append("waits in a loop")
    return tuple(dict.fromkeys(faults))


def _statements(body: str) -> tuple[list[_Statement], dict[str, int]]:
    """Return the instructions in order, and for each label the index of what follows it."""
    statements: list[_Statement] = []
    labels: dict[str, int] = {}
    for piece in _DIRECTIVE.sub("", body).split(";"):
        rest = piece.lstrip(_SCOPE)
        while (label := _LABEL.match(rest)) is not None:
            labels[label.group(1)] = len(statements)
            rest = rest[label.end() :].lstrip(_SCOPE)
        parsed = _STATEMENT.match(rest)
        if parsed is not None:
            statements.append(_Statement(parsed.group(2), parsed.group(3), parsed.group(1) or ""))
    return statements, labels


def _pointer_sources(
    statements: list[_Statement], kernel: str, parameters: str
) -> dict[str, set[int]]:
    """Return for each register the pointers among the parameters that it may come from."""
    pointers = {
        f"{kernel}_param_{i}": i for i, p in enumerate(parameters.split(",")) if ".ptr" in p
    }
    sources: dict[str, set[int]] = defaultdict(set)
    shared: set[int] = set()  # for all values passed through shared memory
    size = -1
    while size != (size := len(shared) + sum(map(len, sources.values()))):
        for opcode, operands, _guard in statements:
            if opcode.startswith("ld.param"):
                target, name = operands.split(",", 1)
                found = {pointers[n] for n in re.findall(r"[\w$]+", name) if n in pointers}
            elif opcode.startswith("st.shared"):
                shared |= _sources_of(operands.rpartition("]")[2], sources)
                continue
            elif opcode.startswith("ld.shared"):
                target, found = operands.partition("[")[0], shared
            elif opcode.startswith((*_EFFECTS, "prefetch")):
                continue
            else:
                target, rest = _target(operands)
                found = _sources_of(rest, sources)
            if found:
                for register in _REGISTER.findall(target):
                    sources[register] |= found
    return sources


def _used_early(statements: list[_Statement], wait: int) -> set[int]:
    """Return the loads before the wait whose values are used for more than prefetches."""
    values: dict[str, set[int]] = defaultdict(set)  # register -> loads that it may come from
    used: set[int] = set()
    size = -1
    while size != (size := len(used) + sum(map(len, values.values()))):
        for i, statement in enumerate(statements):
            opcode, operands, guard = statement
            if opcode.startswith("prefetch"):
                continue
            address, _ = _loaded(statement)
            if address is not None and not opcode.startswith("ld."):
                used |= _sources_of(operands + guard, values) | ({i} if i < wait else set())
            elif address is not None and i < wait:
                found = {i} | _sources_of(address + guard, values)
                for register in _REGISTER.findall(operands.partition("[")[0]):
                    values[register] |= found
            elif opcode.startswith(_EFFECTS):
                used |= _sources_of(operands + guard, values)
            else:
                target, rest = _target(operands)
                if found := _sources_of(rest + guard, values):
                    for register in _REGISTER.findall(target):
                        values[register] |= found
    return used


def _target(operands: str) -> tuple[str, str]:
    """Split operands into written and read ones."""
    target, _, rest = operands.partition("}" if operands.startswith("{") else ",")
    return target, rest


def _sources_of(text: str | None, sources: dict[str, set[int]]) -> set[int]:
    """Return the origins of the registers in a piece of text."""
    if text is None:
        return set()
    return set().union(*(sources[r] for r in _REGISTER.findall(text) if r in sources))


def _loaded(statement: _Statement) -> tuple[str | None, int]:
    """Return the address in global memory that a statement loads from and how many bytes."""
    opcode, operands, _ = statement
    brackets = _BRACKET.findall(operands)
    if opcode.startswith("ld.") and not opcode.startswith(("ld.param", "ld.shared", "ld.const")):
        width = _WIDTH.search(opcode)
        assert width is not None, opcode
        return brackets[-1], int(width.group(1) or 1) * int(width.group(2)) // 8
    if opcode.startswith("cp.async") and len(brackets) > 1:
        size = re.search(r"\]\s*,[^\]]*\]\s*,\s*(0x[0-9a-fA-F]+|\d+)", operands)
        return brackets[1], int(size.group(1), 0) if size is not None else 0
    if opcode.startswith("atom."):
        return brackets[0], 0
    return None, 0


def _stored(statement: _Statement) -> str | None:
    """Return the address in global memory that a statement writes to."""
    opcode = statement.opcode
    if opcode.startswith(("st.", "red.", "atom.")) and ".shared" not in opcode:
        address: str = _BRACKET.findall(statement.operands)[0]
        return address
    return None
