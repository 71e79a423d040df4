"""Other runtimes and busy processes beside ours: weights, tokens, failures, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from stepgraph.runtime.bench import peers, steady
from stepgraph.runtime.bench.peer_runner import Transformers
from stepgraph.runtime.bench.peers import Peer, PeerError, PeerSpec, save_random_weights
from stepgraph.runtime.bench.results import table_rows
from stepgraph.runtime.bench.workload import busy_processes, equal_share
from stepgraph.runtime.errors import StepgraphError
from stepgraph.runtime.loading.checkpoint import CheckpointReader, read_config
from stepgraph.runtime.loading.loader import iter_weights, random_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.presets import CONFIGS, PRESETS

from ..rigs.bench_rig import ROOT, measured, run_bench
from ..rigs.engine_rig import greedy, opened
from ..rigs.gguf_files import write_gguf
from ..rigs.service_rig import wait_until
from ..rigs.tiny_models import TinyModel

ARGUMENTS = "--mode eager --batch-size 2 --input-len 24 --output-len 8 --num-warmup 0"


def transformers(directory: Path) -> Transformers:
    settings = {"threads": torch.get_num_threads(), "device": "cpu", "compiled": False}
    return Transformers({"checkpoint": str(directory), "dtype": "float32", **settings})


def shrunk(name: str) -> dict[str, Any]:
    """A preset of a tiny size."""
    sizes: dict[str, Any] = {
        **{"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "max_position_embeddings": 256, "dtype": "float32"},
        **{"head_dim": 12, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2},
        **{"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6},
        **{"moe_intermediate_size": 32, "num_key_value_heads": 2, "n_shared_experts": 1},
        **{"first_k_dense_replace": 1, "kv_lora_rank": 24},
        **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12},
    }
    preset = CONFIGS[name]
    if preset["num_key_value_heads"] == preset["num_attention_heads"]:
        sizes["num_key_value_heads"] = 4
    if "layer_types" in preset:
        sizes["layer_types"] = preset["layer_types"][:4]
    if "linear_key_head_dim" in preset:
        sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    return preset | sizes


def test_preset_with_codes_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(PeerError):
        save_random_weights(shrunk("gpt-oss-20b"), tmp_path, seed=5)


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"gpt-oss-20b"}))
def test_preset_is_saved_with_its_weights_and_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = shrunk(name)
    save_random_weights(saved, tmp_path, seed=5)
    found, config = read_config(tmp_path), ModelConfig.from_hf(saved)
    assert found == config
    with CheckpointReader(tmp_path) as reader:
        read = dict(iter_weights(reader, config, torch.float32))
    for key, tensor in random_weights(config, torch.float32, 5):
        assert torch.equal(read[key], tensor), key
    monkeypatch.setitem(PRESETS, "tiny", config)
    prompts = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1)).tolist()
    with opened("preset:tiny", seed=5) as engine:
        ours = [output.token_ids for output in engine.generate(prompts, greedy(9))]
    assert equal_share(ours, transformers(tmp_path).run(prompts, 8)["token_ids"]) == 1.0


def test_transformers_have_the_tokens_of_a_checkpoint(
    tiny: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """The generation settings of the checkpoint are left out, the soft cap of scores is not."""
    model = tiny("gemma2")
    prompts = model.prompts(24, 24)
    ours = model.greedy(prompts, 6)
    directory = shutil.copytree(model.directory, tmp_path / "penalty")
    settings = {"repetition_penalty": 9.0, "eos_token_id": ours[0][2], "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    theirs = transformers(directory)
    for _ in range(2):
        found = theirs.run(prompts, 5)
        assert len(found["step_ms"]) == 5
        assert equal_share(ours, found["token_ids"]) == 1.0
    assert len(theirs.run(prompts[:1], 2)["token_ids"]) == 1


@pytest.mark.parametrize("version", [None, "5.16.9"])
def test_without_transformers_nothing_is_measured(
    version: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    file = tmp_path / "a.json"
    arguments = f"{ARGUMENTS} --baseline transformers --output-json {file}"
    assert run_bench(monkeypatch, arguments) == 1
    assert not file.exists()


def test_transformers_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = "--baseline transformers --dtype float32 --num-iters 2"
    document = measured(monkeypatch, tmp_path, f"{ARGUMENTS} {flags}")
    (case,) = document["cases"]
    (entry,) = case["baselines"]
    assert entry["tokens_equal"] == 1.0
    assert case["step_ms"]["n"] == entry["step_ms"]["n"] == 14
    assert entry["speedup"] == entry["step_ms"]["p50"] / case["step_ms"]["p50"]
    assert (entry["name"], entry["dtype"]) == ("transformers", "float32")
    _, (row,) = table_rows(document)
    assert row["times faster than transformers"] == f"{entry['speedup']:.2f}"
    assert row["= transformers"] == "100%"


def spinning(parent: int | None = None, word: str = "getppid") -> list[psutil.Process]:
    """Return the live children whose command line has a word."""
    found = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_busy_processes_spin_as_this_process_may() -> None:
    """Until the block ends, also by an error; one that ends before is an error."""
    with pytest.raises(StepgraphError), busy_processes(2):  # noqa: PT012
        found = spinning()
        assert len(found) == 2
        wait_until(lambda: all(sum(p.cpu_times()[:2]) > 0.2 for p in found))
        for process in found:
            assert process.nice() == psutil.Process().nice()
            assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(0)
            process.send_signal(signal.SIGINT)  # a terminal sends it to the whole group
        time.sleep(0.05)
        assert len(spinning()) == 2
        found[0].kill()
        wait_until(lambda: found[0].status() == psutil.STATUS_ZOMBIE)
    assert spinning() == []


def test_busy_processes_end_with_their_parent() -> None:
    pid = os.fork()
    if pid == 0:
        try:
            with busy_processes(2):
                time.sleep(60)
        finally:
            os._exit(1)  # whatever happens: a child that returned would go on with the tests
    wait_until(lambda: len(spinning(pid)) == 2)
    left = spinning(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: not any(p.is_running() for p in left))


FAKE_VLLM = """
import os
from types import SimpleNamespace
__version__ = "1.2.3"
EngineArgs = SamplingParams = dict
class LLMEngine:
    @classmethod
    def from_engine_args(cls, args):
        assert os.path.isfile(os.path.join(args["model"], "config.json"))
        if args["max_num_seqs"] == 7:
            raise MemoryError("seven rows\\nare too many")
        print("noise on stdout", flush=True)
        return cls()
    def __init__(self):
        self.requests, self.prefilled, self.steps = {}, [], 0
    def add_request(self, name, prompt, params):
        assert params["ignore_eos"] and prompt["prompt_token_ids"]
        self.requests[name] = params["max_tokens"]
    def step(self):
        self.steps += 1
        if self.steps == FAIL_AT:
            os._exit(3)
        self.prefilled = list(self.requests)[: len(self.prefilled) + 1]  # one prompt a step
        return [SimpleNamespace(request_id=name) for name in self.prefilled]
    def has_unfinished_requests(self):
        return bool(self.requests)
    def abort_request(self, names):
        self.requests, self.prefilled = {}, []
"""

FAKE_LLAMA_CPP = """
import ctypes
from unittest.mock import MagicMock
__version__ = "4.5.6"
anything = MagicMock()
logits = (ctypes.c_float * 6)(*range(6))
def __getattr__(name):
    return getattr(anything, name)
def llama_model_load_from_file(path, params):
    return open(path, "rb").read(4) == b"GGUF" or exit(5)
def llama_vocab_n_tokens(vocab):
    return 3
def llama_decode(context, batch):
    assert batch.n_tokens in (24, 2), "prompts, then all rows"
    return 0
def llama_get_logits(context):
    return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `vllm` that this interpreter can import; no process is left at the end."""
    path = tmp_path / "vllm.py"
    path.write_text(FAKE_VLLM.replace("FAIL_AT", "0"))
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA_CPP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    # A file that is replaced within a second by one of the same size looks unchanged to a cache.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(steady, "SETTLING_SECONDS", 0.0)
    yield path
    assert spinning(word="peer_runner") == []


def open_peer(rows: int = 2) -> Peer:
    limits = {"threads": 1, "rows": rows, "tokens": 64, "batch_tokens": 16}
    settings = {"dtype": "bfloat16", "weight_dtype": "auto", **limits}
    return Peer(PeerSpec("vllm"), ROOT / "runtime" / "demo", **settings)


def test_peer_that_fails_dies_or_hangs(fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError):
        open_peer(rows=7)
    fake_vllm.write_text(FAKE_VLLM.replace("FAIL_AT", "4"))
    with closing(open_peer()) as peer:
        for _ in range(2):
            with pytest.raises(PeerError):
                peer.run([[1], [2]], 5)
    hangs = FAKE_VLLM.replace("self.steps += 1", "import time; time.sleep(60)")
    fake_vllm.write_text(hangs.replace("FAIL_AT", "0"))
    with closing(open_peer()) as peer:
        monkeypatch.setattr(peers, "REPLY_SECONDS", 0.0)
        with pytest.raises(PeerError):
            peer.run([[1]], 5)


def test_peer_is_measured_beside_busy_processes(
    fake_vllm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = f"{ARGUMENTS} --peer vllm --num-iters 2 --neighbours 0 1"
    document = measured(monkeypatch, tmp_path, flags)
    assert [case["neighbours"] for case in document["cases"]] == [0, 1]
    for case in document["cases"]:
        (peer,) = case["baselines"]
        assert (peer["name"], peer["version"], peer["dtype"]) == ("vllm", "1.2.3", "bfloat16")
        assert case["step_ms"]["n"] == peer["step_ms"]["n"] == 14
        assert len(case["repetition_ms"]) == len(peer["repetition_ms"]) == 2
        assert peer["step_ms"]["min"] > 0
        assert peer["tokens_equal"] is None
    _, rows = table_rows(document)
    assert [row["busy"] for row in rows] == ["-", "1"]


def test_our_cases_are_kept_if_a_peer_fails(
    fake_vllm: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first case has the peer, in the second it ends."""
    fake_vllm.write_text(FAKE_VLLM.replace("FAIL_AT", "12"))
    flags = ARGUMENTS.replace("--batch-size 2", "--batch-size 1 2") + " --peer vllm --num-iters 1"
    document = measured(monkeypatch, tmp_path, flags, 1)
    found = [(case["batch_size"], len(case["baselines"])) for case in document["cases"]]
    assert found == [(1, 1), (2, 0)]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("stepgraph bench: error: vllm: it ended")


def test_peer_reads_the_gguf_file(
    fake_vllm: Path, base: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM reads none on a CPU, and nothing is measured."""
    write_gguf(base, tmp_path / "tiny.gguf")
    flags = f"{ARGUMENTS} --model {tmp_path}/tiny.gguf --num-iters 2 --peer"
    assert run_bench(monkeypatch, f"{flags} vllm") == 1
    document = measured(monkeypatch, tmp_path, f"{flags} llama.cpp")
    ((peer,),) = [case["baselines"] for case in document["cases"]]
    assert (peer["name"], peer["version"]) == ("llama.cpp", "llama-cpp-python 4.5.6")
    assert (peer["dtype"], peer["step_ms"]["n"]) == ("gguf", 14)
    assert peer["prefill_tokens_per_second"] > 0
