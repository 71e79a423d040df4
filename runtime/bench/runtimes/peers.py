"""Other runtimes that the scenarios measure, each in its own process.

For `--scenario neighbours` the process runs `peer_runner` in the Python that has the runtime
installed, loads the model once, and then decodes on request, so that its steps and ours are
interleaved. `load.servers` starts the servers of `--scenario serve`.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ...config import DTYPES, EngineConfig
from ...errors import StepgraphError
from ...loading.loader import resolve_source
from ..results.result_document import num_threads
from .peer_runner import MODULES
from .transformers_model import load_model

__all__ = [
    "SERVER_MODULES",
    "Peer",
    "PeerError",
    "PeerSpec",
    "choose_peers",
    "environment_of",
    "peer_spec",
    "start_peers",
]

RUNNER = Path(__file__).with_name("peer_runner.py")
REPLY_SECONDS = 900
"""A peer that takes longer for a request is ended. The first request exports and compiles."""
MAX_REASON = 300
"""Characters of an error of another program."""
SERVER_MODULES = {
    "llama.cpp": ("llama_cpp", "gguf", "fastapi", "uvicorn", "sse_starlette", "pydantic_settings"),
    "transformers": ("transformers", "accelerate", "fastapi", "uvicorn", "openai"),
}
"""What the server of a runtime needs, by its name."""


class PeerError(StepgraphError, RuntimeError):
    """Another runtime is not installed, or failed."""


class PeerSpec(NamedTuple):
    """Another runtime, and the Python that has it installed."""

    name: str
    python: str

    def missing(self, modules: Sequence[str]) -> list[str]:
        """Return those of some modules that its Python cannot import.

        Raises:
            PeerError: the Python cannot be run.
        """
        find = "import importlib.util as u, sys\nfor m in sys.argv[1:]:\n"
        find += " try: found = u.find_spec(m)\n except ImportError: found = None\n"
        find += " if found is None: print(m)"
        try:
            done = subprocess.run(
                [self.python, "-P", "-c", find, *modules],
                env=environment_of(self.python),
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerError(
                f"--peer {self.name}: cannot run {self.python} (Python 3.11 or newer):"
                f" {error!s:.{MAX_REASON}}"
            ) from error
        return done.stdout.split()


def peer_spec(text: str) -> PeerSpec:
    """Read `NAME` or `NAME=PYTHON`, for argparse."""
    name, equals, python = text.partition("=")
    names = dict.fromkeys((*MODULES, *SERVER_MODULES))
    if name not in names or (equals and not python):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME or NAME=PYTHON with NAME one of {', '.join(names)}"
        )
    return PeerSpec(name, python or sys.executable)


def choose_peers(
    given: Sequence[PeerSpec] | None,
    device: torch.device,
    modules: Mapping[str, Sequence[str]] = MODULES,
) -> list[PeerSpec]:
    """Return the runtimes to measure: those given, else those that this interpreter has.

    Args:
        given: None: no choice was made.
        device: what is measured.
        modules: what each runtime that can be measured needs.

    Raises:
        PeerError: one that was given cannot be measured, is not installed, or `device` is not a
            CPU.
    """
    if given is None:
        specs = [PeerSpec(name, sys.executable) for name in modules]
        return [s for s in specs if device.type == "cpu" and not s.missing(modules[s.name])]
    if device.type != "cpu":
        raise PeerError(f"--peer measures on a CPU, and the device is {str(device)!r}")
    for spec in given:
        if spec.name not in modules:
            raise PeerError(
                f"--peer {spec.name} is not measured here: choose among {', '.join(modules)}"
            )
        if missing := spec.missing(modules[spec.name]):
            raise PeerError(
                f"--peer {spec.name}: {spec.python} has no {', '.join(missing)}: install it there,"
                f" or name another Python with --peer {spec.name}=PYTHON"
            )
    return list(given)


def start_peers(
    stack: ExitStack,
    specs: Sequence[PeerSpec],
    model: str,
    config: EngineConfig,
    *,
    required: bool,
    say: Callable[[str], None],
) -> list[Peer]:
    """Start other runtimes with the checkpoint and the limits of an engine; the stack ends them.

    A preset's random weights are saved as a checkpoint first. Unless all are `required`, one that
    fails is left out, which `say` reports.

    Raises:
        StepgraphError: a required runtime fails, or transformers, which saves weights, is missing.
    """
    peers: list[Peer] = []
    if not specs:
        return peers
    source = resolve_source(model)
    dtype = source.config.torch_dtype if config.dtype == "auto" else config.dtype
    checkpoint = source.directory
    assert config.max_model_len is not None
    for spec in specs:
        try:
            say(f"loading {model} in {spec.name}")
            if checkpoint is None:
                scratch = tempfile.TemporaryDirectory(prefix="stepgraph-checkpoint-")
                checkpoint = Path(stack.enter_context(scratch))
                load_model(
                    source.config,
                    None,
                    dtype=DTYPES[dtype],
                    device=torch.device("cpu"),
                    seed=config.seed,
                ).save_pretrained(checkpoint)
            peer = Peer(
                spec,
                checkpoint,
                dtype=dtype,
                threads=num_threads(),
                rows=config.max_num_seqs,
                tokens=config.max_model_len,
                batch_tokens=config.prefill_chunk + config.max_num_seqs,
            )
        except StepgraphError as error:
            if required:
                raise
            say(f"left out: {error}")
        else:
            peers.append(stack.enter_context(closing(peer)))
    return peers


class Peer:
    """A model in another runtime; `close` it at the end."""

    def __init__(self, spec: PeerSpec, checkpoint: Path, *, dtype: str, **limits: int) -> None:
        """Start the process and load the model.

        Args:
            spec: which runtime, in which Python.
            checkpoint: directory in Hugging Face format.
            dtype: of weights, arithmetic and cache, by torch's name.
            limits: `threads` that it computes with, `rows` of the largest batch, `tokens` of the
                longest sequence and `batch_tokens` of a step, prompts included.

        Raises:
            PeerError: the runtime fails or does not answer.
        """
        self.name, self.dtype = spec.name, dtype
        self._scratch = tempfile.TemporaryDirectory(prefix="stepgraph-peer-")
        self._log = Path(self._scratch.name, "stderr")
        with self._log.open("wb") as log:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [spec.python, "-P", str(RUNNER)],
                env=environment_of(spec.python) | {"OMP_NUM_THREADS": str(limits["threads"])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C is handled here, and `close` kills the whole group. The session stays
                # ours, as the kernel may schedule processors by session.
                process_group=0,
            )
        try:
            loaded = self._request(
                runtime=spec.name,
                checkpoint=str(checkpoint),
                scratch=self._scratch.name,
                dtype=dtype,
                **limits,
            )
        except BaseException:
            self.close()
            raise
        self.version: str = loaded["version"]

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
        """End the process. Idempotent."""
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
            line = _read_line(replies)
        except BrokenPipeError:
            line = b""
        if line is None:
            raise PeerError(f"{self.name}: no reply within {REPLY_SECONDS} s")
        reply = json.loads(line) if line else {"error": f"it ended: {self._last_words()}"}
        if "error" in reply:
            reason = " ".join(reply["error"].split())
            raise PeerError(f"{self.name}: {reason:.{MAX_REASON}}")
        found: dict[str, Any] = reply
        return found

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "without a message")


def environment_of(python: str = sys.executable) -> dict[str, str]:
    """Return the environment for a Python; `PYTHONPATH` is meant for this interpreter alone."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or python == sys.executable}


def _read_line(pipe: IO[bytes]) -> bytes | None:
    """Return a line, empty at the end; None after `REPLY_SECONDS`. A reply is one line."""
    ready, _, _ = select.select([pipe], [], [], REPLY_SECONDS)
    return pipe.readline() if ready else None
