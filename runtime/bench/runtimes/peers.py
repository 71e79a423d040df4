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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ...config import EngineConfig
from ...errors import StepgraphError
from .child_process import ChildProcess
from .peer_runner import MODULES

if TYPE_CHECKING:
    import torch

__all__ = [
    "GGUF_WRITER",
    "SERVER_MODULES",
    "Peer",
    "PeerError",
    "PeerSpec",
    "choose_peers",
    "environment_of",
    "peer_spec",
    "save_preset",
    "start_peers",
]

RUNNER = Path(__file__).with_name("peer_runner.py")
GGUF_WRITER = Path(__file__).with_name("gguf_writer.py")
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

    def run(self, *arguments: str) -> str:
        """Run its Python; return what it prints.

        Raises:
            PeerError: it cannot be run, or fails.
        """
        command, env = [self.python, "-P", *arguments], environment_of(self.python)
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True)
        except OSError as error:
            raise PeerError(f"--peer {self.name}: cannot run {self.python}: {error!s}") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["without a message"])[-1]
            raise PeerError(
                f"--peer {self.name}: {self.python} (Python 3.11 or newer) failed:"
                f" {reason:.{MAX_REASON}}"
            )
        return done.stdout

    def missing(self, modules: Sequence[str]) -> list[str]:
        """Return those of some modules that its Python cannot import; see `run`."""
        find = "import importlib.util as u, sys\nfor m in sys.argv[1:]:\n"
        find += " try: found = u.find_spec(m)\n except ImportError: found = None\n"
        find += " if found is None: print(m)"
        return self.run("-c", find, *modules).split()


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
    from ...loading.loader import resolve_source  # these need torch
    from ..results.result_document import num_threads

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
                checkpoint = save_preset(stack, model, config)
            peer = Peer(
                spec,
                checkpoint,
                dtype=dtype,
                weight_dtype=config.weight_dtype,
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


def save_preset(stack: ExitStack, model: str, config: EngineConfig) -> Path:
    """Save the random weights of a preset as a checkpoint in a directory that the stack removes.

    Raises:
        BaselineError: transformers, which writes the config, is missing or too old.
    """
    import torch

    from ...loading.loader import resolve_source
    from .saved_preset import save_random_weights

    source = resolve_source(model).native
    dtype = getattr(torch, source.torch_dtype if config.dtype == "auto" else config.dtype)
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="stepgraph-checkpoint-"))
    save_random_weights(source, Path(scratch), dtype, config.seed)
    return Path(scratch)


class Peer(ChildProcess):
    """A model in another runtime; `close` it at the end."""

    def __init__(
        self,
        spec: PeerSpec,
        checkpoint: Path,
        *,
        dtype: str,
        weight_dtype: str = "auto",
        **limits: int,
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
            PeerError: the runtime fails or does not answer.
        """
        env = environment_of(spec.python) | {"OMP_NUM_THREADS": str(limits["threads"])}
        super().__init__(spec.name, [spec.python, "-P", str(RUNNER)], env, replies=True)
        try:
            loaded = self._request(
                runtime=spec.name,
                checkpoint=str(checkpoint),
                scratch=self.scratch.name,
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

    def _request(self, **request: Any) -> dict[str, Any]:
        requests, replies = self.process.stdin, self.process.stdout
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
        reply = json.loads(line) if line else {"error": f"it ended: {self.last_words()}"}
        if "error" in reply:
            reason = " ".join(reply["error"].split())
            raise PeerError(f"{self.name}: {reason:.{MAX_REASON}}")
        found: dict[str, Any] = reply
        return found


def environment_of(python: str = sys.executable) -> dict[str, str]:
    """Return the environment for a Python; `PYTHONPATH` is meant for this interpreter alone."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or python == sys.executable}


def _read_line(pipe: IO[bytes]) -> bytes | None:
    """Return a line, empty at the end; None after `REPLY_SECONDS`. A reply is one line."""
    ready, _, _ = select.select([pipe], [], [], REPLY_SECONDS)
    return pipe.readline() if ready else None
