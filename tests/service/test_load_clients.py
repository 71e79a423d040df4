"""Public load clients against the command, each in a process of its own.

guidellm is found by `PATH`. It needs a version of PyTorch of its own, hence an environment of its
own: `PATH=path/to/venv/bin:$PATH pytest -m slow tests/service/test_load_clients.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import stepgraph.runtime.demo

from ..rigs.http_servers import KEY, SECONDS, Command

NUM_REQUESTS = 24
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 16


def pairs(**values: object) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile", [pairs(kind="concurrent", streams=4), pairs(kind="poisson", rate=8)]
)
def test_guidellm_completes_all_requests(tmp_path: Path, profile: str) -> None:
    guidellm = shutil.which("guidellm")
    if guidellm is None:
        pytest.skip("guidellm is not in PATH")
    command = Command("demo", "--port", "0", "--mode", "eager", "--served-model-name", "small")
    command.wait_ready()
    report = tmp_path / "report.json"
    backend = pairs(kind="openai_http", target=command.address, model="small", api_key=KEY)
    folder = stepgraph.runtime.demo.__path__[0]
    sizes = pairs(kind="synthetic_text", prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)
    run = subprocess.run(
        [
            *(guidellm, "run", "--disable-console-interactive"),
            *("--backend", f"{backend},request_format=/v1/completions"),
            *("--profile", profile, "--data", sizes),
            *("--tokenizer", pairs(kind="hf_auto", model=folder)),
            *("--constraint", pairs(kind="max_requests", count=NUM_REQUESTS)),
            *("--output", pairs(kind="json", path=report)),
        ],
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    status, errors = command.stop()
    assert (run.returncode, status) == (0, 0), run.stderr + errors
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests: dict[str, list[Any]] = benchmark["requests"]
    assert {kind: len(made) for kind, made in requests.items() if made} == {
        "successful": NUM_REQUESTS
    }
    for made in requests["successful"]:
        assert made["output_metrics"]["text_tokens"] == OUTPUT_TOKENS
        assert made["input_metrics"]["text_tokens"] >= PROMPT_TOKENS
        assert made["output"]
