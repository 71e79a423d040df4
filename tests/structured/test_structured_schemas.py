"""Outputs of many generated schemas validate with `jsonschema`, or are prefixes of such texts."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from stepgraph.runtime import Engine, GrammarError, SamplingParams

from ..rigs.engine_rig import opened
from ..rigs.structured_rig import ll_tokenizer, matcher_of
from ..rigs.tiny_models import Tiny

EOS = 1
"""A token without text. That of the tiny models is a comma."""
FORMATS = ("date", "time", "ipv4", "uuid", "email")
PATTERNS = ("^[a-c]{1,4}$", "^x[0-9]+y$", "^(foo|bar)-[a-f]*$")


def schema_of(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema without contradictions."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth < 3:
        kinds += ["object"] * 4 + ["array"] * 3 + ["anyOf", "tuple", "map"]
    kind = draw.choice(["object", "array", "anyOf"]) if depth == 0 else draw.choice(kinds)
    inner = lambda: schema_of(draw, depth + 1)  # noqa: E731  # short for the table below
    low = draw.randrange(-50, 50)
    match kind:
        case "string":
            least = draw.randrange(3)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(6)}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(1000)}
        case "number":
            return {"type": "number", "minimum": low, "exclusiveMaximum": low + 7.5}
        case "enum":
            return {"enum": draw.sample(["a", "ü\n", 1, 2.5, None, True, {"k": [1]}], 3)}
        case "const":
            return {"const": draw.choice(['x"y', 0, False, [1, "b"]])}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(PATTERNS)}
        case "format":
            return {"type": "string", "format": draw.choice(FORMATS)}
        case "anyOf":
            return {"anyOf": [inner() for _ in range(draw.randrange(1, 4))]}
        case "array":
            least = draw.randrange(2)
            most = least + draw.randrange(3)
            return {"type": "array", "items": inner(), "minItems": least, "maxItems": most}
        case "tuple":
            items = [inner() for _ in range(draw.randrange(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "map":
            return {"type": "object", "additionalProperties": inner(), "maxProperties": 2}
        case "object":
            names = draw.sample(["a", "b c", "é", "long name", "d", "$e"], draw.randrange(1, 5))
            return {
                "type": "object",
                "properties": {name: inner() for name in names},
                "required": draw.sample(names, draw.randrange(len(names) + 1)),
                "additionalProperties": False,
            }
    return {"type": kind}


@pytest.mark.parametrize(
    "schemas", [80, pytest.param(2000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_outputs_validate(tiny: Tiny, tmp_path: Path, schemas: int) -> None:
    folder = shutil.copytree(tiny("text").directory, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": EOS}))
    with opened(folder, kernels="native", max_num_seqs=16, structured_output=True) as engine:
        check_outputs(engine, folder, schemas)


def check_outputs(engine: Engine, folder: Path, schemas: int) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    space = [i for i in range(tokenizer.vocab_size) if not tokenizer.decode([i]).strip()]
    draw = random.Random(schemas)
    made, refused = [], 0
    while len(made) < schemas:
        schema = schema_of(draw)
        params = SamplingParams(
            max_tokens=120,
            seed=len(made),
            temperature=draw.choice([0.0, 1.0]),
            structured={"json": schema},
            logit_bias=dict.fromkeys(space, draw.choice([0.0, -100.0])),
        )
        try:
            engine.add_request([draw.randrange(36, 90)], params, str(len(made)))
        except GrammarError:
            refused += 1
            continue
        made.append(schema)
    complete = 0
    reference = ll_tokenizer(folder, 320, (EOS,))
    while engine.has_unfinished():
        for output in engine.step():
            if not output.finished:
                continue
            schema, completion = made[int(output.request_id)], output.completions[0]
            if completion.finish_reason == "stop":
                complete += 1
                jsonschema.validate(json.loads(completion.text), schema)
                continue
            assert (completion.finish_reason, output.error) == ("length", None)
            tokens = list(completion.token_ids)
            assert matcher_of(reference, {"json": schema}).validate_tokens(tokens) == len(tokens)
    engine.check_integrity()
    assert complete > schemas // 3
    assert refused < schemas // 10
    print(f"{schemas} schemas: {complete} complete, {schemas - complete} cut, {refused} refused")
