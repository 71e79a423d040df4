"""`Engine.reload_weights`: afterwards an engine is one that was started on the new checkpoint.

What cannot be loaded is refused, or the engine has failed.
"""

from __future__ import annotations

import itertools
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stepgraph.runtime import Engine, EngineConfig, RequestOutput, SamplingParams
from stepgraph.runtime.errors import CheckpointError, ConfigError, EngineFailedError, RequestError
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.loading.loader import OpenedSource
from stepgraph.runtime.models.plan import fused_layout

from ..rigs.engine_rig import greedy, opened
from ..rigs.reload_rig import Write, make_write, results, storage, unchanged  # noqa: F401
from ..rigs.tiny_models import Tiny, TinyModel, byte_level_tokenizer, changed_checkpoint

STEPS = [
    ("gemma3", {}),
    ("deepseek_v3", {}),
    ("odd", {"mode": "compile", "dtype": "bfloat16"}),  # untied, biases, shards
    ("wide", {"weight_dtype": "fp8"}),
    ("wide", {"mode": "compile", "weight_dtype": "int8", "kv_dtype": "int8"}),
    pytest.param("base", {"mode": "compile", "kernels": "torch"}, marks=pytest.mark.slow),
    pytest.param(
        "wide", {"mode": "compile", "weight_dtype": "fp8"}, marks=pytest.mark.slow
    ),  # which torch compiles
]


@pytest.mark.parametrize(("variant", "config"), STEPS)
def test_equals_a_fresh_engine(
    tiny: Tiny, write: Write, variant: str, config: dict[str, Any]
) -> None:
    """Bitwise, with the tensors where they were; and back to the first weights."""
    first, second = tiny(variant).directory, write(variant)
    with opened(second, **config) as fresh:
        expected = results(fresh)
    with opened(first, **config) as engine:
        before, old = storage(engine), results(engine)
        engine.reload_weights(second)
        assert torch.equal(results(engine), expected)
        assert not torch.equal(expected, old), "the checkpoints must differ"
        after = storage(engine)
        assert [place for place, _ in after.values()] == [place for place, _ in before.values()]
        assert all(after[name][1] != before[name][1] for name in before)
        engine.reload_weights(first)
        assert torch.equal(results(engine), old)
        assert storage(engine) == before
        assert engine.stats()["fallbacks"] == 0
        engine.check_integrity()  # compares the addresses of all other static tensors


def test_text_and_ends_are_those_of_the_new_checkpoint(tiny: Tiny, write: Write) -> None:
    second = write("text")
    tokenizer = byte_level_tokenizer(320, ["an other corpus, of other words entirely"] * 8)
    tokenizer.save(str(second / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    (second / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with opened(second) as fresh:
        tokens = fresh.generate("other words", greedy())[0].token_ids
    (second / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[3]}))

    def texts(engine: Engine) -> list[RequestOutput]:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        message = {"role": "user", "content": "other words"}
        return engine.generate("other words", params) + engine.chat([message], params)

    with opened(second) as fresh, opened(tiny("text").directory) as engine:
        assert engine.tokenizer is not None
        assert not engine.tokenizer.chat_templates
        engine.reload_weights(second)
        for found, expected in zip(texts(engine), texts(fresh), strict=True):
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert texts(engine)[0].finish_reason == "stop"
        assert tokens[3] in engine.tokenizer.eos_token_ids
        assert engine.model_config == fresh.model_config
        (second / "tokenizer.json").unlink()
        engine.reload_weights(second)
        assert engine.tokenizer is None
        with pytest.raises(RequestError):
            engine.generate("other words")


def test_what_the_configuration_overrides_may_differ(base: TinyModel, write: Write) -> None:
    second = write(dtype="bfloat16", max_position_embeddings=300)
    config = {"dtype": "float32", "max_model_len": 100, "tie_word_embeddings": True}
    with opened(second, **config) as fresh, opened(base.directory, **config) as engine:
        engine.reload_weights(second)
        assert torch.equal(results(engine), results(fresh))
        short = write(max_position_embeddings=99)
        with pytest.raises(ConfigError):
            engine.reload_weights(short)


def test_weights_are_in_memory_one_at_a_time(
    base: TinyModel, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, seen = OpenedSource.weights, 0

    def watched(
        self: OpenedSource, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal seen
        last: weakref.ref[torch.Tensor] | None = None
        for name, tensor in weights(self, *args, **kwargs):
            assert last is None or last() is None, name
            last = weakref.ref(tensor)
            yield name, tensor
            del tensor
            seen += 1

    with opened(base.directory) as engine:
        monkeypatch.setattr(OpenedSource, "weights", watched)
        engine.reload_weights(write())
        assert seen == len(fused_layout(engine.model_config))


class Reloads(RuleBasedStateMachine):
    """Requests, steps and reloads in any order: each request runs on one model from end to end."""

    sources: dict[str, Path]
    fresh: dict[str, Engine]

    def __init__(self) -> None:
        super().__init__()
        self.model = "first"
        self.expected: dict[str, list[int]] = {}
        config = EngineConfig(device="cpu", mode="eager", max_num_seqs=2, block_size=4)
        self.engine = Engine.from_pretrained(self.sources["first"], config)

    @rule(prompt=st.lists(st.integers(0, 30), min_size=1, max_size=20))
    def add(self, prompt: list[int]) -> None:
        request_id = self.engine.add_request(prompt, greedy(5))
        (output,) = self.fresh[self.model].generate([prompt], greedy(5))
        self.expected[request_id] = output.token_ids

    @rule()
    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                tokens = self.expected.pop(output.request_id)
                assert output.token_ids == tokens[: len(output.token_ids)]
                assert output.token_ids == tokens or output.finish_reason == "abort"

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.expected))))

    @rule(name=st.sampled_from(["first", "second", "deeper", "lost"]))
    def reload(self, name: str) -> None:
        busy = self.engine.has_unfinished()
        try:
            self.engine.reload_weights(self.sources[name])
        except ConfigError:
            assert name == "deeper"
        except CheckpointError:
            assert name == "lost"
        except RequestError:
            assert busy
        else:
            assert not busy
            self.model = name

    @invariant()
    def consistent(self) -> None:
        self.engine.check_integrity()
        assert self.engine.stats()["healthy"]

    def teardown(self) -> None:
        with self.engine:
            while self.engine.has_unfinished():
                self.step()
            assert not self.expected


def test_any_order(tiny: Tiny, write: Write) -> None:
    sources = {"first": tiny("micro").directory, "second": write("micro")}
    sources |= {"deeper": write("micro", num_hidden_layers=2), "lost": write("micro")}
    (sources["lost"] / "model.safetensors").unlink()
    with opened(sources["first"]) as first, opened(sources["second"]) as second:
        Reloads.sources, Reloads.fresh = sources, {"first": first, "second": second}
        limits = settings(max_examples=8, stateful_step_count=25)
        run_state_machine_as_test(Reloads, settings=limits)  # type: ignore[no-untyped-call]


# Refusals ----------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "base": [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": LINEAR},
        {"num_hidden_layers": 2},
        {"tie_word_embeddings": False},
        {"max_position_embeddings": 300},
        {"dtype": "bfloat16"},
    ],
    "gemma2": [{"sliding_window": 10}, {"final_logit_softcapping": None}],
    "mistral_full": [{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}],
}


@pytest.mark.parametrize("variant", DIFFERENT)
def test_another_model_is_refused(tiny: Tiny, write: Write, variant: str) -> None:
    with opened(tiny(variant).directory, block_size=4) as engine, unchanged(engine):
        for changes in DIFFERENT[variant]:
            second = write(variant, **changes)
            with pytest.raises(ConfigError):
                engine.reload_weights(second)


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop(directory: Path) -> None:
    changed_checkpoint(directory, directory, lambda tensors: tensors.pop("model.norm.weight"))


def spoil_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


def test_a_damaged_checkpoint_is_refused(base: TinyModel, write: Write) -> None:
    with opened(base.directory, block_size=4) as engine, unchanged(engine):
        for damage in (cut, drop, spoil_tokenizer, shutil.rmtree):
            second = write()
            damage(second)
            with pytest.raises(CheckpointError):
                engine.reload_weights(second)


@pytest.mark.parametrize("error", [CheckpointError("no such sector"), KeyboardInterrupt()])
def test_a_failure_halfway_ends_the_engine(
    base: TinyModel, write: Write, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    second, read = write(), CheckpointReader.tensor
    reads = itertools.count(1)

    def tensor(self: CheckpointReader, name: str) -> torch.Tensor:
        if next(reads) == 10:
            raise error
        return read(self, name)

    with opened(base.directory) as engine:
        monkeypatch.setattr(CheckpointReader, "tensor", tensor)
        is_error = isinstance(error, Exception)
        with pytest.raises(EngineFailedError if is_error else KeyboardInterrupt):
            engine.reload_weights(second)
        monkeypatch.undo()
        assert not engine.stats()["healthy"]
        with pytest.raises(EngineFailedError):
            engine.generate([[1]])
        with pytest.raises(EngineFailedError):
            engine.reload_weights(second)
