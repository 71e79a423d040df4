"""Tiny random models on disk, each beside the transformers model that it was saved from."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which others below do
    from .triton_interpreter import install

    install()

import hypothesis
import transformers
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.engine import startup
from stepgraph.runtime.memory import measurement
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

# No deadline: a busy machine is no fault of an example.
hypothesis.settings.register_profile("stepgraph", deadline=None, max_examples=50)
hypothesis.settings.load_profile("stepgraph")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background ignores SIGINT, which the tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    # Six query heads over two kv heads, and 6 * 16 != 48.
    "base": {},
    "micro": {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    # Everything at once that a compiled engine can stumble over.
    "odd": {
        "vocab_size": 131,
        "hidden_size": 21,
        "intermediate_size": 37,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3_ROPE,
        "max_shard_size": "20KB",
    },
    # Rows of whole blocks of 128, and of blocks and a part of one.
    "wide": {
        "hidden_size": 128,
        "intermediate_size": 300,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 40,
    },
    "one_kv_head": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "as_many_kv_heads": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sharded": {"max_shard_size": "50KB", "tie_word_embeddings": False},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": LINEAR_ROPE},
    "text": {"vocab_size": 320, "num_hidden_layers": 2},
    # Other families. Prompts of the tests are longer than several of their windows.
    "qwen3": {
        "model_type": "qwen3",
        "num_hidden_layers": 6,  # of which the last two slide: three groups of two layers
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 4,
        "head_dim": 14,
        "attention_bias": True,
    },
    "qwen3_yarn": {
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "rope_parameters": YARN,
    },
    "mistral": {
        "model_type": "mistral",
        "sliding_window": 13,
        "head_dim": 20,
        "tie_word_embeddings": False,
    },
    "mistral_full": {"model_type": "mistral", "sliding_window": None},
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 7.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,  # the sixth alone does not slide
        "sliding_window": 10,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 6,
        "first_k_dense_replace": 3,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 6,
        "head_dim": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 22,
        "kv_lora_rank": 18,
        "qk_nope_head_dim": 9,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "rms_norm_eps": 1e-3,  # of the norms between layers only
        "tie_word_embeddings": False,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
EOS_TOKEN_IDS = [13, 22]
MEASURED_SECONDS = {
    name: getattr(measurement, name) for name in ("_SECONDS_PER_SERIES", "_SECONDS_WITH_MASKS")
}
GPU_BLOCKS = 2048
"""More than any test's rows use, and a few MiB of a tiny model."""


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint, and what transformers makes of it in float32."""

    directory: Path
    reference: PreTrainedModel

    @property
    def vocab_size(self) -> int:
        return int(self.reference.config.vocab_size)

    def prompts(self, *lengths: int, seed: int = 1) -> list[list[int]]:
        """Random prompts of the given lengths."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(self.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    def greedy(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, **settings: Any
    ) -> list[list[int]]:
        """What transformers' `generate` appends to each prompt, decoded as one padded batch.

        Without an end-of-sequence token, unless `settings` name one; what follows it is padding.
        """
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        options = {"eos_token_id": None, "pad_token_id": 0} | settings
        output = self.reference.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options
        )
        return output[:, longest:].tolist()

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits behind every token, float32 `[len(token_ids), V]`."""
        return self.reference(torch.tensor([token_ids])).logits[0]

    def reload(self, dtype: torch.dtype) -> PreTrainedModel:
        """The checkpoint as transformers runs it in another dtype, soft caps included."""
        return AutoModelForCausalLM.from_pretrained(
            self.directory, dtype=dtype, attn_implementation="eager"
        ).eval()


def randomize(model: PreTrainedModel) -> None:
    """Give weights that spread the logits (standard deviation about 3), so argmax is robust.

    Matrices are scaled by the number of their inputs, so that what a layer adds is of order one,
    and embeddings are small beside it: else a model with tied ones would repeat its last token.
    Gemma multiplies its embeddings by the root of the hidden size, and its norms by one plus their
    weight.
    """
    torch.manual_seed(3)
    gemma = model.config.model_type.startswith("gemma")
    one = 0.0 if gemma else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif name == "model.norm.weight":
                parameter.normal_(20.0 if gemma else 1.5, 0.25)
            elif "norm" in name:
                parameter.normal_(one, 0.2)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.02 if gemma else 0.3)
            else:
                parameter.normal_(0.0, 2.0 * parameter.shape[1] ** -0.5)


CORPUS = ["def main(): return 'the naïve café' # stop here, then there and over there"] * 8


def byte_level_tokenizer(vocab_size: int, corpus: Sequence[str] = CORPUS) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    counts: Counter[str] = Counter()
    without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without_gpu)
        if (sampled := item.get_closest_marker("sampled")) is not None:
            function = item.nodeid.partition("[")[0]
            if counts[function] % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            counts[function] += 1


@pytest.fixture(scope="session", autouse=True)
def quiet_and_single_threaded() -> Iterator[None]:
    """Tiny tensors lose time in every thread beyond the first, and more on a busy machine."""
    threads, asked = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # which engines respect
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    if asked is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = asked


@pytest.fixture(autouse=True)
def untuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are of default sizes, whatever the user tuned, and what a test tunes is its own."""
    if importlib.util.find_spec("triton") is None:
        return
    from stepgraph.runtime.kernels.triton import tuning

    monkeypatch.setattr(tuning, "cache_directory", lambda: tmp_path / "stepgraph")
    for name in ("_known", "_best_config"):
        unused = functools.cache(getattr(tuning, name).__wrapped__)
        monkeypatch.setattr(tuning, name, unused)


@pytest.fixture(scope="session", autouse=True)
def steps_are_measured_briefly() -> Iterator[None]:
    """An engine that starts measures the smallest step of each series: larger ones take longer
    than most tests of a tiny model. Tests of measured memory restore the times.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in MEASURED_SECONDS:
            patch.setattr(measurement, name, 0.0)
        yield


@pytest.fixture
def steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts measures as many steps as it does outside of the tests."""
    for name, seconds in MEASURED_SECONDS.items():
        monkeypatch.setattr(measurement, name, seconds)


@pytest.fixture
def steps_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts runs no step: interpreted kernels take seconds for one."""
    unknown = measurement.StepMemory({"attention_masks": 0})
    monkeypatch.setattr(startup, "measure_steps", lambda *_, **__: unknown)
    monkeypatch.setattr(startup, "add_scoring", lambda memory, _: memory)


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """What `torch.empty` returns is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Return the model of a variant, written to disk when it is first asked for."""
    made: dict[str, TinyModel] = {}

    def make(variant: str) -> TinyModel:
        if variant not in made:
            settings = BASE | VARIANTS[variant]
            shard = settings.pop("max_shard_size", "1GB")
            config = AutoConfig.for_model(settings.pop("model_type", "llama"), **settings)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            randomize(model)
            model.generation_config = GenerationConfig(eos_token_id=EOS_TOKEN_IDS)
            directory = tmp_path_factory.mktemp(variant)
            model.save_pretrained(directory, max_shard_size=shard)
            if variant == "text":
                tokenizer = byte_level_tokenizer(model.config.vocab_size)
                tokenizer.save(str(directory / "tokenizer.json"))
            made[variant] = TinyModel(directory, model)
        return made[variant]

    return make


@pytest.fixture(scope="session")
def base(tiny: Callable[[str], TinyModel]) -> TinyModel:
    return tiny("base")


@pytest.fixture
def open_engine(tiny: Callable[[str], TinyModel]) -> Iterator[Callable[..., Engine]]:
    """Open an engine on a variant for one test: eager on the CPU unless told otherwise.

    On a GPU its cache has a fixed size, because tests of several processes share the memory.
    """
    engines: list[Engine] = []

    def make(variant: str, **config: Any) -> Engine:
        settings = {"device": "cpu", "mode": "eager", "max_num_seqs": 4} | config
        if settings["device"] != "cpu" and not settings.keys() & {"memory_tokens", "memory_bytes"}:
            settings.setdefault("num_blocks", GPU_BLOCKS)
        engines.append(Engine.from_pretrained(tiny(variant).directory, EngineConfig(**settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def compiled(tiny: Callable[[str], TinyModel]) -> Iterator[Callable[[str], Engine]]:
    """Return the compiled engine of a variant, shared by all tests: compiling takes seconds.

    A test leaves it idle. Blocks of 8, at most 4 rows, chunks of 24: sizes that differ from
    each other and from the number of blocks of a row, because equal ones are compiled once more.
    """
    engines: dict[str, Engine] = {}

    def make(variant: str) -> Engine:
        if variant not in engines:
            config = EngineConfig(
                device="cpu", mode="compile", max_num_seqs=4, block_size=8, prefill_chunk=24
            )
            engines[variant] = Engine.from_pretrained(tiny(variant).directory, config)
        assert not engines[variant].has_unfinished()
        return engines[variant]

    yield make
    for engine in engines.values():
        assert engine.stats()["fallbacks"] == 0
        engine.check_integrity()
        engine.close()
