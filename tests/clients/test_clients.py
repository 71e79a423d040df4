"""Clients of the HTTP APIs, unchanged, against a server whose answers are scripted.

Each script in `scripts` gets BASE_URL (http://127.0.0.1:PORT), MODEL and API_KEY, and exits with 0
or says what differs. Python scripts need the packages of their clients in the environment of the
interpreter STEPGRAPH_CLIENTS_PYTHON; .cjs scripts need node, and theirs in the folder
STEPGRAPH_CLIENTS_NODE_MODULES.

The model answers with a call of the first tool until there is an output of one, then with a text;
with reasoning before, where the request turns it on. JSON follows the schema of the request.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import ChatPrompt, Engine, SamplingParams
from stepgraph.runtime.structured_output import StructuredOutput

from ..rigs.http_rig import demo_with_template, quick_config
from ..rigs.http_servers import KEY, Threaded

SCRIPTS = sorted(Path(__file__).with_name("scripts").glob("*.[pc]*"))
VARIABLES = {".py": "STEPGRAPH_CLIENTS_PYTHON", ".cjs": "STEPGRAPH_CLIENTS_NODE_MODULES"}
MODEL = "scripted"
SECONDS = 200
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
)
TEXT = "It is sunny."
REASONING = "<think>\nLet me see.\n</think>\n\n"


def value_of(schema: Any) -> Any:
    """A value that a JSON schema of a tool allows."""
    kind = schema.get("type")
    if "enum" in schema:
        return schema["enum"][0]
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: value_of(properties[name]) for name in schema.get("required", properties)}
    samples: dict[Any, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": []}
    return samples.get(kind, "Rome")


def answer(prompt: Any) -> str:
    """What the model says to a prompt."""
    if not isinstance(prompt, ChatPrompt):
        return TEXT
    text = REASONING if prompt.template_kwargs.get("enable_thinking") else ""
    if not prompt.tools or any(message["role"] == "tool" for message in prompt.messages):
        return text + TEXT
    function = prompt.tools[0]["function"]
    arguments = value_of(function.get("parameters") or {"type": "object"})
    call = json.dumps({"name": function["name"], "arguments": arguments})
    return f"{text}<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = demo_with_template(tmp_path_factory.mktemp("clients"), TEMPLATE)
    options = {"tool_parser": "hermes", "reasoning_parser": "think"}
    server = Threaded(
        lambda: Engine.from_pretrained(folder, quick_config(2048)),
        model_names=[MODEL],
        api_keys=[KEY],
        **options,
    )
    stream = server.engine.stream

    def scripted(prompt: Any, params: SamplingParams, **options: Any) -> Any:
        structured = params.structured
        if structured is None or structured.kind in ("calls", "grammar"):
            structured = StructuredOutput(choice=[answer(prompt)])
        elif structured.kind == "json":  # without other properties, which a model could go on with
            closed = json.loads(structured.source) | {"additionalProperties": False}
            structured = StructuredOutput(json=closed)
        return stream(prompt, dataclasses.replace(params, structured=structured), **options)

    server.engine.stream = scripted  # type: ignore[method-assign, assignment]
    yield f"http://127.0.0.1:{server.port}"
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_client(script: Path, base_url: str) -> None:
    variable = VARIABLES[script.suffix]
    if not (given := os.environ.get(variable)):
        pytest.skip(f"{variable} is not set")
    command, env = ["node", str(script)], {**os.environ, "NODE_PATH": given}
    if script.suffix == ".py":
        command[0] = given
    env |= {"BASE_URL": base_url, "MODEL": MODEL, "API_KEY": KEY}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
