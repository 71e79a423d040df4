"""Servers of a load, each a child process: `stepgraph serve`, and those of other runtimes."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from ...config import EngineConfig
from ..results.result_document import num_threads
from ..runtimes.child_process import ChildProcess
from ..runtimes.peers import GGUF_WRITER, MAX_REASON, PeerError, PeerSpec

__all__ = [
    "TEXT_TOKENS",
    "Server",
    "engine_command",
    "peer_command",
    "peer_version",
    "save_text_tokenizer",
]

HOST = "127.0.0.1"
START_SECONDS = 600
POLL_SECONDS = 0.2
READY_PATHS = {"stepgraph": "/ready", "llama.cpp": "/v1/models", "transformers": "/health"}
"""Pages that respond with 200 once the model is loaded."""
GUARD = '("$@" </dev/null; kill -9 0) & read -r _; kill -9 0'
"""Shell script that runs a command, and ends its process group when the command or the pipe on its
standard input ends: also a killed benchmark leaves no server."""
TEXT_TOKENS = 94
"""Tokens of a saved preset that are single printable characters of ASCII: ids 0 to 93."""


class Server(ChildProcess):
    """A server on a free port of this machine; `close` it at the end."""

    def __init__(
        self, name: str, command: Callable[[int], Sequence[str]], env: Mapping[str, str]
    ) -> None:
        """Start `command`, which gets the port, and wait until its model is loaded.

        Raises:
            PeerError: it ended, or does not answer.
        """
        self.host, self.port = HOST, _free_port()
        super().__init__(name, ["sh", "-c", GUARD, "sh", *command(self.port)], env)
        end = time.monotonic() + START_SECONDS
        try:
            while not self._is_ready():
                if self.process.poll() is not None:
                    raise PeerError(f"{name}: it ended: {self.last_words():.{MAX_REASON}}")
                if time.monotonic() > end:
                    raise PeerError(f"{name}: it does not answer within {START_SECONDS} s")
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        connection = HTTPConnection(self.host, self.port, timeout=START_SECONDS)
        with closing(connection), suppress(OSError, HTTPException):
            connection.request("GET", READY_PATHS[self.name])
            return connection.getresponse().status == 200
        return False


def engine_command(model: str, config: EngineConfig, port: int) -> list[str]:
    """Return the command of `stepgraph serve` with a configuration."""
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
    command = [sys.executable, "-m", "stepgraph", "serve", model]
    return [*command, "--host", HOST, "--port", str(port), "--no-access-log", *flags]


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
    spec.run(str(GGUF_WRITER), str(checkpoint), str(path))  # converts it
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


def save_text_tokenizer(vocab_size: int, checkpoint: Path) -> None:
    """Add a tokenizer without merges to a checkpoint.

    A prompt of n of the first `TEXT_TOKENS` tokens is a text of n characters, in every runtime.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"w{number}" for number in range(len(texts), vocab_size)]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    Path(checkpoint, "tokenizer_config.json").write_text(json.dumps(settings))


def peer_version(spec: PeerSpec) -> str:
    """Return the version of the package of a peer."""
    package = {"llama.cpp": "llama-cpp-python"}.get(spec.name, spec.name)
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return f"{package} {spec.run('-c', code).strip()}"


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
