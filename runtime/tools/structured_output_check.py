"""Checks that outputs follow JSON schemas: those of files, and of the official test suite.

    python -m stepgraph.runtime.tools.structured_output_check PATH ... --output-len 300

A path is a JSON schema, a file of the JSON-Schema-Test-Suite (a list of cases with a schema each),
or a folder of these. Each schema is used for one request. An output that ended is validated with
the package jsonschema; one that was cut by its length must be a prefix that its grammar accepts.
The test suite is part of the source distribution of jsonschema (`json/tests`); the wheel of
check-jsonschema has schemas of real applications (`builtin_schemas/vendor`).
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.request_output import RequestOutput
from ..errors import GrammarError, RequestError
from ..sampling_params import SamplingParams
from ..structured_output import StructuredOutput
from .arguments import positive_int

__all__ = ["main"]

_DIALECTS: Final = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
"""Dialects of the test suite by folder; its schemas of older drafts do not name theirs."""


CHUNK: Final = 64
"""Schemas that are compiled before their outputs are generated."""


class _Case(NamedTuple):
    name: str
    schema: Any


def main(arguments: list[str] | None = None) -> None:
    """Print how many schemas were refused, and how many outputs are valid, cut and wrong.

    `unchecked`: jsonschema cannot apply the schema. `failed`: the request ended with an error.
    """
    parser = CommandParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--model", default="demo", help="as of Engine.from_pretrained")
    parser.add_argument("--rows", type=positive_int, default=8)
    parser.add_argument("--output-len", type=positive_int, default=300)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--speculation", help="as of EngineConfig")
    parser.add_argument("--show", action="store_true", help="print refused schemas, with reasons")
    given = parser.parse_args(arguments)
    cases = [case for path in given.paths for case in _cases(path)]
    config = EngineConfig(
        max_num_seqs=given.rows, structured_output=True, speculation=given.speculation
    )
    with Engine.from_pretrained(given.model, config) as engine:
        counts = _check(engine, cases, given)
    for name, count in counts.items():
        print(f"{name:10} {count}")
    if counts["wrong"] or counts["failed"]:
        raise SystemExit(1)


def _cases(path: Path) -> Iterator[_Case]:
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield from _cases(file)
        return
    content = json.loads(path.read_text())
    if not isinstance(content, list):
        yield _Case(path.name, content)
        return
    dialect = next((_DIALECTS[part] for part in path.parts if part in _DIALECTS), None)
    for case in content:
        schema = case["schema"]
        if isinstance(schema, dict) and dialect is not None:
            schema = {"$schema": dialect, **schema}
        yield _Case(f"{path.parent.name}/{path.name}: {case['description']}", schema)


def _check(engine: Engine, cases: Sequence[_Case], given: argparse.Namespace) -> Counter[str]:
    """Generate an output for each schema, and check it."""
    outcomes = ("refused", "valid", "unchecked", "cut", "failed", "wrong")
    counts = Counter({"schemas": len(cases)} | dict.fromkeys(outcomes, 0))
    for first in range(0, len(cases), CHUNK):
        accepted, wanted = [], []
        for number, case in enumerate(cases[first : first + CHUNK], first):
            fields = {"max_tokens": given.output_len, "temperature": given.temperature}
            try:
                params = SamplingParams(**fields, seed=number, structured={"json": case.schema})
            except RequestError as error:
                _count("refused", case, error, counts, given)
                continue
            accepted.append(case)
            wanted.append(params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of refused prompts, which are counted
            outputs = engine.generate(["JSON: "] * len(wanted), wanted)
        for case, output in zip(accepted, outputs, strict=True):
            outcome, reason = _outcome(engine, case, output)
            _count(outcome, case, reason, counts, given)
    return counts


def _count(
    outcome: str, case: _Case, reason: object, counts: Counter[str], given: argparse.Namespace
) -> None:
    counts[outcome] += 1
    if outcome in ("failed", "wrong") or (given.show and reason is not None):
        print(f"{outcome}: {case.name}: {reason}")


def _outcome(engine: Engine, case: _Case, output: RequestOutput) -> tuple[str, object]:
    import jsonschema  # type: ignore[import-untyped]  # a package of tests

    if isinstance(output.error, GrammarError):
        return "refused", output.error
    if output.error is not None:
        return "failed", output.error
    (completion,) = output.completions
    if completion.finish_reason == "stop":
        kind = jsonschema.validators.validator_for(case.schema, jsonschema.Draft202012Validator)
        try:
            kind(case.schema).validate(json.loads(completion.text))
        except (ValueError, jsonschema.ValidationError) as error:
            return "wrong", f"{completion.text[:200]!r}: {str(error).partition(chr(10))[0]}"
        except Exception as error:  # such as a pattern that Python cannot read
            return "unchecked", repr(error)
        return "valid", None
    grammars = engine._intake._grammars
    assert grammars is not None
    (matcher,) = grammars.matchers(StructuredOutput(json=case.schema), 1)
    tokens = list(completion.token_ids)
    followed = matcher._first.validate_tokens(tokens)
    if followed == len(tokens):
        return "cut", None
    return "wrong", f"token {followed} of {completion.text[:200]!r} is not allowed"


if __name__ == "__main__":
    main()
