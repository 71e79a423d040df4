"""Tiny random Llamas on disk, each beside the transformers model that it was saved from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from stepgraph.runtime import Engine, EngineConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

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
    "one_kv_head": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "as_many_kv_heads": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sharded": {"max_shard_size": "50KB", "tie_word_embeddings": False},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": LINEAR_ROPE},
    "text": {"vocab_size": 320, "num_hidden_layers": 2},
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


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint, and what transformers makes of it in float32."""

    directory: Path
    reference: LlamaForCausalLM

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


def randomize(model: LlamaForCausalLM) -> None:
    """Give weights that spread the logits (standard deviation about 3), so argmax is robust.

    Matrices are scaled by the number of their inputs, so that what a layer adds is of order one,
    and embeddings are small beside it: else a model with tied ones would repeat its last token.
    """
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif name == "model.norm.weight":
                parameter.normal_(1.5, 0.25)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 2.0 * parameter.shape[1] ** -0.5)


def byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["def main(): return 'the naïve café' # stop here, then there and over there"] * 8
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


@pytest.fixture(scope="session", autouse=True)
def quiet_and_single_threaded() -> Iterator[None]:
    """Tiny tensors lose time in every thread beyond the first, and more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Return the model of a variant, written to disk when it is first asked for."""
    made: dict[str, TinyModel] = {}

    def make(variant: str) -> TinyModel:
        if variant not in made:
            settings = BASE | VARIANTS[variant]
            shard = settings.pop("max_shard_size", "1GB")
            model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
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
    """Open an engine on a variant for one test: eager on the CPU unless told otherwise."""
    engines: list[Engine] = []

    def make(variant: str, **config: Any) -> Engine:
        settings = {"device": "cpu", "mode": "eager", "max_rows": 4} | config
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
                device="cpu", mode="compile", max_rows=4, block_size=8, prefill_chunk=24
            )
            engines[variant] = Engine.from_pretrained(tiny(variant).directory, config)
        assert not engines[variant].has_unfinished()
        return engines[variant]

    yield make
    for engine in engines.values():
        assert engine.stats()["fallbacks"] == 0
        engine.check_integrity()
        engine.close()
