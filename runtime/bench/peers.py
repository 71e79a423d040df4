"""Other runtimes that `--scenario neighbours` measures, each in its own process.

The process runs `peer_runner` in the Python that has the runtime installed, loads the model once,
and then decodes on request, so that its steps and ours are interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import StepgraphError
from .peer_runner import RUNTIMES

__all__ = ["Peer", "PeerError", "PeerSpec", "peer_spec"]

RUNNER = Path(__file__).with_name("peer_runner.py")
REPLY_SECONDS = 900
"""A peer that takes longer for a request is ended. The first request exports and compiles."""
MAX_REASON = 300
"""Characters of an error of another program."""


class PeerError(StepgraphError, RuntimeError):
    """Another runtime is not installed, failed, or cannot run the model."""


class PeerSpec(NamedTuple):
    """Another runtime, and the Python that has it installed."""

    name: str
    python: str


def peer_spec(text: str) -> PeerSpec:
    """Read `NAME` or `NAME=PYTHON`, for argparse."""
    name, equals, python = text.partition("=")
    if name not in RUNTIMES or (equals and not python):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME or NAME=PYTHON with NAME one of {', '.join(RUNTIMES)}"
        )
    return PeerSpec(name, python or sys.executable)


class Peer:
    """A model in another runtime, in a process group; `close` it at the end."""

    def __init__(
        self, spec: PeerSpec, checkpoint: Path, *, dtype: str, weight_dtype: str, **limits: int
    ) -> None:
        """Start the process and load the model.

        Args:
            spec: which runtime, in which Python.
            checkpoint: directory in Hugging Face format.
            dtype: of weights, arithmetic and cache, by torch's name.
            weight_dtype: of our weights: llama.cpp stores them as q8_0 for int8, others ignore it.
            limits: `threads` that it computes with, `rows` of the largest batch, `tokens` of the
                longest sequence and `batch_tokens` of a step, prompts included.

        Raises:
            PeerError: the runtime cannot be run, fails or does not answer.
        """
        self.name = spec.name
        env = os.environ | {"OMP_NUM_THREADS": str(limits["threads"])}
        if spec.python != sys.executable:  # the path is meant for this interpreter alone
            env.pop("PYTHONPATH", None)
        self._scratch = tempfile.TemporaryDirectory(prefix="stepgraph-peer-")
        self._log = Path(self._scratch.name, "log")
        with self._log.open("wb") as log:
            try:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    [spec.python, "-P", str(RUNNER)],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # Ctrl-C is handled here, and `close` kills the whole group. The session stays
                    # ours, as the kernel may schedule processors by session.
                    process_group=0,
                )
            except OSError as error:
                raise PeerError(f"{self.name}: cannot run {spec.python}: {error}") from error
        try:
            loaded = self._request(
                runtime=spec.name,
                checkpoint=str(checkpoint),
                scratch=self._scratch.name,
                dtype=dtype,
                weight_dtype=weight_dtype,
                **limits,
            )
        except BaseException:
            self.close()
            raise
        self.version: str = loaded["version"]
        self.dtype: str = loaded["stored_as"] or dtype
        """Of the weights of linear layers."""

    def prefill(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Run until every prompt has its first token; each may get `max_tokens`."""
        self._request(do="prefill", prompts=prompts, max_tokens=max_tokens)

    def steps(self, count: int) -> list[float]:
        """Decode the whole batch `count` times; return the milliseconds of each step."""
        step_ms: list[float] = self._request(do="steps", count=count)["step_ms"]
        return step_ms

    def end(self) -> None:
        """Drop the requests."""
        self._request(do="end")

    def close(self) -> None:
        """Kill the process and its children. Idempotent."""
        with suppress(ProcessLookupError):  # it has ended and was waited for
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self._process:  # a request that was not read
            self._process.wait()
        self._scratch.cleanup()

    def _request(self, **request: Any) -> dict[str, Any]:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
            ready, _, _ = select.select([replies], [], [], REPLY_SECONDS)  # a reply is one line
        except BrokenPipeError:
            line = b""
        else:
            if not ready:
                raise PeerError(f"{self.name}: no reply within {REPLY_SECONDS} s")
            line = replies.readline()
        reply = json.loads(line) if line else {"error": f"it ended: {self._last_words()}"}
        if "error" in reply:
            reason = " ".join(reply["error"].split())
            raise PeerError(f"{self.name}: {reason:.{MAX_REASON}}")
        found: dict[str, Any] = reply
        return found

    def _last_words(self) -> str:
        """Return the last line of the log that is not blank."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a message"
