"""Other runtimes that decode the same cases with the same weights, each in its own process.

The process runs `peer_runner` in the Python that has the runtime installed, loads the model once,
and then decodes on request, so that its repetitions and ours are interleaved.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import StepgraphError
from .peer_runner import RUNTIMES

RUNNER = Path(__file__).with_name("peer_runner.py")
REPLY_SECONDS = 900
"""A peer that takes longer for a request is ended. The first requests export and compile."""
MAX_REASON = 300
"""Characters of an error of another program."""


class PeerError(StepgraphError, RuntimeError):
    """Another runtime is not installed, failed, or cannot run the model."""


class PeerSpec(NamedTuple):
    """Another runtime, and the Python that has it installed."""

    name: str
    python: str = sys.executable


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

    def __init__(self, spec: PeerSpec, checkpoint: Path, **settings: Any) -> None:
        """Start the process and load the model.

        Args:
            spec: which runtime, in which Python.
            checkpoint: directory in Hugging Face format, or a GGUF file.
            settings: `dtype` of weights, arithmetic and cache, by torch's name; `weight_dtype` of
                our weights: llama.cpp stores them as q8_0 for int8, others ignore it; `threads`
                that it computes with, `rows` of the largest batch, `tokens` of the longest
                sequence and `batch_tokens` of a step, prompts included; of transformers the
                `device` and whether decoding is `compiled`.

        Raises:
            PeerError: the runtime cannot be run, fails or does not answer, or reads no GGUF file.
        """
        self.name = spec.name
        if checkpoint.is_file() and not RUNTIMES[spec.name].reads_gguf:
            able = ", ".join(name for name, runtime in RUNTIMES.items() if runtime.reads_gguf)
            raise PeerError(
                f"{self.name}: it cannot read the GGUF file {checkpoint} on a CPU: compare with"
                f" {able}, or give a checkpoint in Hugging Face format"
            )
        env = os.environ | {"OMP_NUM_THREADS": str(settings["threads"])}
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
                **settings,
            )
        except BaseException:
            self.close()
            raise
        dtype = loaded.pop("stored_as") or settings["dtype"]  # of the weights of linear layers
        self.about: dict[str, Any] = {"name": spec.name, "dtype": dtype, **loaded}
        """The name, version and settings of the runtime, for the JSON."""

    def run(self, prompts: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
        """Prefill prompts of one length and decode all of them `steps` times.

        Return the milliseconds of each step as `step_ms` and until the last row has its first
        token as `prefill_ms`, and `token_ids` where they are known.
        """
        return self._request(prompts=prompts, steps=steps)

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
        if line:
            reply: dict[str, Any] = json.loads(line)
        else:
            words = self._log.read_text(errors="replace").strip().splitlines()
            reply = {"error": f"it ended: {words[-1] if words else 'without a message'}"}
        if "error" in reply:
            reason = " ".join(reply["error"].split())
            raise PeerError(f"{self.name}: {reason:.{MAX_REASON}}")
        return reply


@contextmanager
def checkpoint_of(model: str, dtype: str, seed: int, device: str = "cpu") -> Iterator[Path]:
    """Yield the directory or the GGUF file of a model; a preset is saved in a directory that is
    removed afterwards.

    Raises:
        PeerError: see `save_random_weights`.
    """
    from ..loading.loader import PRESET_PREFIX, resolve_source  # needs torch
    from ..models.presets import CONFIGS

    source = resolve_source(model)
    if source.directory is not None:
        yield source.directory
        return
    with tempfile.TemporaryDirectory(prefix="stepgraph-checkpoint-") as scratch:
        stored = source.native.torch_dtype if dtype == "auto" else dtype
        config = CONFIGS[model.removeprefix(PRESET_PREFIX)] | {"dtype": stored}
        save_random_weights(config, Path(scratch), seed, device)
        yield Path(scratch)


def save_random_weights(
    config_json: dict[str, Any], directory: Path, seed: int, device: str = "cpu"
) -> None:
    """Write a `config.json` and random weights of its `dtype`.

    Raises:
        PeerError: checkpoints of the family have codes (gpt-oss), which are not written.
    """
    import torch
    from safetensors.torch import save_file

    from ..loading.loader import random_weights
    from ..models.config import ModelConfig
    from ..models.plan import fused_layout

    config = ModelConfig.from_hf(config_json)
    named = config_json | {"architectures": [config.family.architecture]}
    (directory / "config.json").write_text(json.dumps(named))
    layout, stored = fused_layout(config), getattr(torch, config.torch_dtype)
    names = (source.name for parameter in layout.values() for source in parameter.sources)
    if any(name is not None and name.endswith("_blocks") for name in names):
        raise PeerError(
            f"a preset of {config.model_type}, whose checkpoints have experts in MXFP4, cannot be"
            " compared with other runtimes: give a checkpoint, or another preset"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in random_weights(config, stored, seed, device=device):
        for part, values in layout[name].parts(tensor):
            if part.name is None:
                continue  # zeros that checkpoints leave out
            if part.name not in tensors:
                tensors[part.name] = torch.empty(part.shape, dtype=stored)
            part.write(tensors[part.name], values.cpu())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
