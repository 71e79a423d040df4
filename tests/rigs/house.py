"""Prints the size and the shape of this source tree as a Markdown table: `make house`.

A room is a folder at the root or in `runtime/`, with its subfolders; the files of `runtime/` itself
are one too. A room lies on the floor above the highest of those that it imports. Where rooms
import each other in a circle, the arrow with the fewest imports counts as upward and is left out.
"""

from __future__ import annotations

import ast
import cProfile
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from stepgraph import Engine, EngineConfig, SamplingParams

from ..project.test_imports import FILES, imports

ROOT = Path(__file__).parents[2]
MEASURING = ("profiling/", "runtime/bench/", "runtime/tools/")
PUBLIC = {"_replace", "_exit"}
"""Documented methods of named tuples and `os`, and private functions of the product too."""


def lines_of(files: Iterable[str]) -> int:
    return sum((ROOT / file).read_bytes().count(b"\n") for file in files)


def statement_lines(file: str) -> int:
    """Count lines without blank ones, comments, docstrings, imports and lone brackets."""
    text, other = (ROOT / file).read_text(), set[int]()
    for node in ast.walk(ast.parse(text)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        exported = isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__"
        if docstring or exported or isinstance(node, ast.Import | ast.ImportFrom):
            other |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    numbered = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(not re.fullmatch(r"(#.*|[)\]}]+[,:]?)?", s) and i not in other for i, s in numbered)


def private_names(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names `_x` of functions and attributes."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    names |= {
        n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
    return {name for name in names if re.match("_[^_]", name)}


def floors() -> tuple[int, int, list[str]]:
    """Return the numbers of rooms and floors, and the upward arrows."""
    files = [file for file in FILES if not file.endswith("package/__init__.py")]
    arrows = Counter(
        (room_of(file), room_of(found.target))
        for file in files
        for found in imports(file)
        if found.ours and room_of(file) != room_of(found.target)
    )
    upward = []
    while True:
        rooms = sorted({room_of(file) for file in files})
        below = {room: sorted(b for a, b in arrows if a == room) for room in rooms}
        try:
            order = [*TopologicalSorter(below).static_order()]
            break
        except CycleError as error:
            circle = [(b, a) for a, b in pairwise(error.args[1])]
            weakest = min(circle, key=arrows.__getitem__)
            upward.append(f"{weakest[0]} -> {weakest[1]} ({arrows.pop(weakest)} imports)")
    floor: dict[str, int] = {}
    for room in order:
        floor[room] = 1 + max((floor[other] for other in below[room]), default=0)
    return len(floor), max(floor.values()), upward


def room_of(file: str) -> str:
    face = file in ("runtime/__init__.py", "runtime/package/__main__.py")
    return "face" if face else "/".join(Path(file).parent.parts[: 2 if file[0] == "r" else 1])


def entered(act: Callable[[], object]) -> str:
    """Return how many files of the product a call enters, and its Python calls."""
    profile, product = cProfile.Profile(), {str(ROOT / file) for file in FILES}
    profile.runcall(act)
    found: Counter[str] = Counter()
    for entry in profile.getstats():
        if not isinstance(entry.code, str):  # a function of C
            found[os.path.realpath(entry.code.co_filename)] += entry.callcount
    calls = [count for path, count in found.items() if path in product]
    return f"{len(calls)} / {sum(calls)}"


def main() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = [file for file in listed.stdout.split("\n") if (ROOT / file).is_file()]
    tests = [file for file in files if file.startswith("tests/")]
    product = [f for f in files if f.endswith((".py", ".cpp", ".h")) and f not in tests]
    python = [file for file in product if file.endswith(".py")]
    trees = {f: ast.parse((ROOT / f).read_bytes()) for f in files if f.endswith(".py")}
    of_tests = [trees[file] for file in tests if file in trees]
    private = private_names(trees[f] for f in python) - private_names(of_tests) - PUBLIC
    nodes = [node for tree in of_tests for node in ast.walk(tree)]
    uses = sum(isinstance(n, ast.Attribute) and n.attr in private for n in nodes)
    matches = sum(isinstance(n, ast.keyword) and n.arg == "match" for n in nodes)
    measuring = lines_of(file for file in product if file.startswith(MEASURING))
    flat = sum(bool(re.match("tests/test_", file)) for file in tests)
    rooms, levels, upward = floors()
    config = EngineConfig(mode="compile", threads=1, max_num_seqs=4)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with Engine.from_pretrained("demo", config, progress=False) as engine:
        engine.generate(["import os"], params)
        adding = entered(lambda: engine.add_request("def main(", params))
        for _ in range(3):
            engine.step()
        stepping = entered(engine.step)
    print("| | now |\n|---|---:|")
    for name, value in {
        "product: lines / files": f"{lines_of(product):,} / {len(product)}",
        "lines of Python statements": f"{sum(map(statement_lines, python)):,}",
        "measuring": f"{measuring / lines_of(product):.1%}",
        "tests: lines / files outside folders": f"{lines_of(tests):,} / {flat}",
        "tests: uses of private attributes / match=": f"{uses} / {matches}",
        f"floors of {rooms} rooms / upward arrows": f"{levels} / {len(upward)}",
        "decode step (compile, 1 row): files / Python calls": stepping,
        "add_request: files / Python calls": adding,
        "pages of docs": sum(bool(re.match(r"docs/[\w-]+\.md", file)) for file in files),
    }.items():
        print(f"| {name} | {value} |")
    print("\n" + "\n".join(f"upward: {arrow}" for arrow in upward))


if __name__ == "__main__":
    main()
