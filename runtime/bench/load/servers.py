"""Servers of a load, each a child process: `stepgraph serve`, and those of other runtimes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil
import torch

from ...config import DTYPES, EngineConfig
from ...loading.loader import resolve_source
from ..results.result_document import num_threads
from ..runtimes.peers import PeerError, PeerSpec, environment_of
from ..runtimes.transformers_model import load_model

__all__ = [
    "TEXT_TOKENS",
    "Server",
    "engine_command",
    "peer_command",
    "peer_version",
    "save_text_checkpoint",
]

HOST = "127.0.0.1"
START_SECONDS = 600
POLL_SECONDS = 0.2
MAX_REASON = 300
READY_PATHS = {"stepgraph": "/ready", "llama.cpp": "/v1/models", "transformers": "/health"}
"""Pages that respond with 200 once the model is loaded."""
GUARD = '("$@" </dev/null; kill -9 0) & read -r _; kill -9 0'
"""Shell script that runs a command, and ends its process group when the command or the pipe on its
standard input ends: also a killed benchmark leaves no server."""
TEXT_TOKENS = 94
"""Tokens of a saved preset that are single printable characters of ASCII: ids 0 to 93."""
GGUF_RUNNER = Path(__file__).parent.parent.joinpath("runtimes", "peer_runner.py")
"""Converts a checkpoint, in the Python that has llama.cpp."""


class Server:
    """A server on a free port of this machine; `close` it at the end."""

    def __init__(
        self, name: str, command: Callable[[int], Sequence[str]], env: dict[str, str]
    ) -> None:
        """Start `command`, which gets the port, and wait until its model is loaded.

        Raises:
            PeerError: it ended, or does not answer.
        """
        self.name, self.host, self.port = name, HOST, _free_port()
        self._scratch = tempfile.TemporaryDirectory(prefix="stepgraph-server-")
        self._log = Path(self._scratch.name, "log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", GUARD, "sh", *command(self.port)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,  # `close` ends its children too
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process. Idempotent."""
        with suppress(ProcessLookupError):  # it has ended and was waited for
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            self._process.wait()
        self._scratch.cleanup()

    def cpu_seconds(self) -> float:
        """Return the CPU time of its processes so far."""
        seconds = 0.0
        for child in psutil.Process(self._process.pid).children(recursive=True):
            times = child.cpu_times()
            seconds += times.user + times.system
        return seconds

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                lines = self._log.read_text(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else "without a message"
                raise PeerError(f"{self.name}: it ended: {reason:.{MAX_REASON}}")
            if self._is_ready():
                return
            time.sleep(POLL_SECONDS)
        raise PeerError(f"{self.name}: it does not answer within {START_SECONDS} s")

    def _is_ready(self) -> bool:
        connection = HTTPConnection(self.host, self.port, timeout=START_SECONDS)
        with closing(connection), suppress(OSError, HTTPException):
            connection.request("GET", READY_PATHS[self.name])
            return connection.getresponse().status == 200
        return False


def engine_command(
    model: str, config: EngineConfig, port: int, program: Sequence[str] = ("stepgraph", "serve")
) -> list[str]:
    """Return the command of `stepgraph serve`, or a `program` like it, with a configuration."""
    flags: list[str] = []
    defaults = EngineConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == getattr(defaults, field.name):
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            flags += [f"--{name}", *map(str, value)]
        else:
            flags.append(f"--{name}={value}")
    command = [sys.executable, "-m", *program, model]
    return [*command, "--host", HOST, "--port", str(port), *flags]


def peer_command(
    spec: PeerSpec, checkpoint: Path, *, dtype: str, tokens: int
) -> Callable[[int], list[str]]:
    """Return a function of the port: the command of another runtime's server.

    Args:
        spec: which one, in which Python.
        checkpoint: directory in Hugging Face format, with a tokenizer.
        dtype: of weights and arithmetic, by torch's name.
        tokens: of the longest sequence.

    Raises:
        PeerError: the checkpoint cannot be converted.
    """
    if spec.name == "transformers":
        main = "from transformers.cli.transformers import main; main()"
        command = [spec.python, "-P", "-c", main, "serve", str(checkpoint)]
        command += ["--device", "cpu", "--dtype", dtype, "--host", HOST, "--port"]
        return lambda port: [*command, str(port)]
    path = checkpoint / "model.gguf"
    _run(spec, [str(GGUF_RUNNER), str(checkpoint), str(path)])
    flags = {
        "model": path,
        "n_ctx": tokens,
        "n_threads": num_threads(),
        "n_threads_batch": num_threads(),
        "logits_all": "false",  # it would compute them for every token of a prompt
        "interrupt_requests": "false",  # a new request would end the stream of another
        "host": HOST,
    }
    command = [spec.python, "-P", "-m", "llama_cpp.server"]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return lambda port: [*command, "--port", str(port)]


def save_text_checkpoint(model: str, config: EngineConfig, directory: Path) -> None:
    """Save the random weights of a preset, with a tokenizer for its vocabulary.

    The tokenizer has no merges: a prompt of n of the first `TEXT_TOKENS` tokens is a text of n
    characters, in every runtime.

    Raises:
        BaselineError: transformers, which saves weights, is missing.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    source = resolve_source(model).config
    dtype = source.torch_dtype if config.dtype == "auto" else config.dtype
    load_model(
        source, None, dtype=DTYPES[dtype], device=torch.device("cpu"), seed=config.seed
    ).save_pretrained(directory)
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"w{number}" for number in range(len(texts), source.vocab_size)]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    Path(directory, "tokenizer_config.json").write_text(json.dumps(settings))


def peer_version(spec: PeerSpec) -> str:
    """Return the version of the package of a peer."""
    package = {"llama.cpp": "llama-cpp-python"}.get(spec.name, spec.name)
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return f"{package} {_run(spec, ['-c', code]).strip()}"


def _run(spec: PeerSpec, arguments: Sequence[str]) -> str:
    """Run the Python of a peer; return what it prints."""
    done = subprocess.run(
        [spec.python, "-P", *arguments],
        env=environment_of(spec.python),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["without a message"])[-1]
        raise PeerError(f"{spec.name}: {reason:.{MAX_REASON}}")
    return done.stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
