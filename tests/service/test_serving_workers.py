"""The snippet of docs/serving.md under gunicorn, with and without `--preload`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gunicorn")
pytest.importorskip("uvicorn_worker")
httpx = pytest.importorskip("httpx")

ROOT = Path(__file__).parents[2]
SECONDS = 120


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--preload"], []])
def test_workers_of_gunicorn_serve_the_documented_application(
    flags: list[str], tmp_path: Path
) -> None:
    section = (ROOT / "docs/serving.md").read_text().split("## In your own application")[1]
    snippet = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert snippet is not None
    (tmp_path / "snippet.py").write_text(snippet[1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [
        *(sys.executable, "-m", "gunicorn", "--chdir", str(tmp_path), "--timeout", str(SECONDS)),
        *("--worker-class", "uvicorn_worker.UvicornWorker", "--bind", f"127.0.0.1:{port}"),
        *(*flags, "snippet:application"),
    ]
    url = f"http://127.0.0.1:{port}/llm"
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as p:
        try:
            end = time.monotonic() + SECONDS
            while not _is_ready(url):
                assert p.poll() is None
                assert time.monotonic() < end
                time.sleep(0.2)
            body = {"prompt": "def f(", "max_tokens": 4}
            for _ in range(4):  # workers take turns
                response = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
                assert response.json()["choices"][0]["finish_reason"] == "length"
        finally:
            p.send_signal(signal.SIGTERM)
    assert p.returncode == 0


def _is_ready(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/ready", timeout=10).status_code == 200)
    except httpx.TransportError:
        return False
