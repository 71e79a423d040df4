"""`Engine.reload_weights`: afterwards an engine is one that was started on the new checkpoint."""

from __future__ import annotations

import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from safetensors.torch import load_file, save_file
from stepgraph.runtime import Engine, EngineConfig, RequestOutput, SamplingParams
from stepgraph.runtime.errors import (
    CheckpointError,
    ConfigError,
    EngineBusyError,
    EngineFailedError,
    RequestError,
)
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.loading.opened_source import OpenedSource
from stepgraph.runtime.models.layout import fused_layout

from .conftest import byte_level_tokenizer
from .engine_rig import greedy, run

if TYPE_CHECKING:
    from .conftest import TinyModel

Write = Callable[..., Path]
TOKENS = [5, 1, 19, 7, 30, 2, 11, 23, 3, 8]


@pytest.fixture
def write(tiny: Callable[[str], TinyModel], tmp_path: Path) -> Write:
    """Write a checkpoint like that of a variant: other weights, and changes of its config."""

    def make(variant: str = "base", seed: int = 1, **config: Any) -> Path:
        directory = tmp_path / f"{variant}-{seed}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny(variant).directory, directory)
        generator = torch.Generator().manual_seed(seed)
        for path in directory.glob("*.safetensors"):
            tensors = load_file(path)
            for tensor in tensors.values():
                tensor *= 1.0 + 0.5 * torch.randn(tensor.shape, generator=generator)
            save_file(tensors, path)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return directory

    return make


@contextmanager
def opened(directory: Path, **config: Any) -> Iterator[Engine]:
    fields: dict[str, Any] = {"device": "cpu", "mode": "eager", "max_num_seqs": 4} | config
    with Engine.from_pretrained(directory, EngineConfig(**fields)) as engine:
        yield engine


def results(engine: Engine) -> torch.Tensor:
    """Logits of prefill and decode steps."""
    return engine.score(TOKENS, 4)


def storage(engine: Engine) -> dict[str, tuple[int, int]]:
    """Address and contents of every parameter, in a form that can be compared."""
    return {
        name: (p.data_ptr(), hash(p.detach().contiguous().view(torch.uint8).numpy().tobytes()))
        for name, p in engine.decoder.named_parameters()
    }


STEPS = [
    ("base", {}),
    ("odd", {}),  # untied, biases, shards
    ("gemma3", {}),
    ("deepseek_v3", {}),
    ("base", {"mode": "compile"}),
    ("odd", {"mode": "compile", "dtype": "bfloat16"}),
    ("gemma2", {"mode": "compile", "dtype": "bfloat16", "weight_dtype": "int8"}),
    ("wide", {"weight_dtype": "fp8"}),
    ("wide", {"mode": "compile", "weight_dtype": "int8", "kv_dtype": "int8"}),
    pytest.param("base", {"mode": "compile", "kernels": "torch"}, marks=pytest.mark.slow),
    pytest.param(
        "wide", {"mode": "compile", "weight_dtype": "fp8"}, marks=pytest.mark.slow
    ),  # which torch compiles
]


@pytest.mark.parametrize(("variant", "config"), STEPS)
def test_equals_a_fresh_engine(
    tiny: Callable[[str], TinyModel], write: Write, variant: str, config: dict[str, Any]
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


def test_shared_blocks_are_those_of_the_new_weights(
    tiny: Callable[[str], TinyModel], write: Write
) -> None:
    prompt, second = (TOKENS * 8)[:70], write()
    with opened(second, block_size=4) as fresh:
        expected = fresh.generate([prompt], greedy())[0].token_ids
    with opened(tiny("base").directory, block_size=4) as engine:
        for _ in range(2):
            engine.generate([prompt], greedy())
        engine.reload_weights(second)
        output = engine.generate([prompt], greedy())[0]
        assert output.token_ids == expected
        assert output.cached_tokens == 0
        assert engine.generate([prompt], greedy())[0].token_ids == expected


def test_text_and_ends_are_those_of_the_new_checkpoint(
    tiny: Callable[[str], TinyModel], write: Write
) -> None:
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
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            engine.generate("other words")


def test_encoder_outputs_are_forgotten(base: TinyModel, write: Write) -> None:
    runs: list[bytes] = []

    def encoder(content: bytes) -> torch.Tensor:
        runs.append(content)
        return torch.ones(2, 48)

    with opened(base.directory, prompt_embeds=True, encoder_cache_bytes=1 << 20) as engine:
        for _ in range(2):
            engine.encode(b"image", encoder)
        engine.reload_weights(write())
        engine.encode(b"image", encoder)
    assert len(runs) == 2


ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DIFFERENT = [
    ("base", {"rms_norm_eps": 1e-3}, r"rms_norm_eps is 0\.001, .* prepared for 1e-06"),
    ("base", {"rope_parameters": ROPE}, "rope_theta is 5000"),
    ("base", {"rope_parameters": LINEAR}, r"rope_scaling\.type is 'linear', .* for 'default'"),
    ("base", {"num_hidden_layers": 2}, "num_hidden_layers is 2, .* prepared for 3"),
    ("base", {"tie_word_embeddings": False}, "tie_word_embeddings is False, .* for True"),
    ("base", {"max_position_embeddings": 300}, "max_position_embeddings is 300, .* for 256"),
    ("base", {"dtype": "bfloat16"}, "torch_dtype is 'bfloat16', .* for 'float32'"),
    ("base", {"hidden_size": 64, "vocab_size": 98}, "vocab_size is 98, .* prepared for 97"),
    ("gemma2", {"sliding_window": 10}, "sliding_window is 10, .* prepared for 9"),
    ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is None, .* for 7"),
    (
        "mistral_full",
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "model_type is 'llama', .* for 'mistral'",
    ),
]


@contextmanager
def unchanged(engine: Engine) -> Iterator[None]:
    """Assert that the block changes neither weights nor what is cached, and that it serves."""
    before, logits, tokenizer = storage(engine), results(engine), engine.tokenizer
    engine.generate([TOKENS * 4], greedy())
    yield
    output = engine.generate([TOKENS * 4], greedy())[0]
    assert output.cached_tokens
    assert storage(engine) == before
    assert torch.equal(results(engine), logits)
    assert engine.tokenizer is tokenizer
    assert engine.stats()["healthy"]
    engine.check_integrity()


@pytest.mark.parametrize(("variant", "changes", "message"), DIFFERENT)
def test_another_model_is_refused(
    tiny: Callable[[str], TinyModel],
    write: Write,
    variant: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    second = write(variant, **changes)
    with (
        opened(tiny(variant).directory, block_size=4) as engine,
        unchanged(engine),
        pytest.raises(ConfigError, match=message),
    ):
        engine.reload_weights(second)


def test_what_the_configuration_overrides_may_differ(base: TinyModel, write: Write) -> None:
    second = write(dtype="bfloat16", max_position_embeddings=300)
    config = {"dtype": "float32", "max_model_len": 100, "tie_word_embeddings": True}
    with opened(second, **config) as fresh, opened(base.directory, **config) as engine:
        engine.reload_weights(second)
        assert torch.equal(results(engine), results(fresh))
        short = write(max_position_embeddings=99)
        with pytest.raises(ConfigError, match="max_position_embeddings is 99"):
            engine.reload_weights(short)


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def reshape(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(47)
    save_file(tensors, path)


def spoil_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("damage", [cut, drop, reshape, spoil_tokenizer, shutil.rmtree])
def test_a_damaged_checkpoint_is_refused(
    base: TinyModel, write: Write, damage: Callable[[Path], None]
) -> None:
    second = write()
    damage(second)
    with (
        opened(base.directory, block_size=4) as engine,
        unchanged(engine),
        pytest.raises(CheckpointError),
    ):
        engine.reload_weights(second)


@pytest.mark.parametrize("error", [CheckpointError("no such sector"), KeyboardInterrupt()])
def test_a_failure_halfway_ends_the_engine(
    base: TinyModel, write: Write, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    second, read = write(), CheckpointReader.tensor
    left = 10

    def tensor(self: CheckpointReader, name: str) -> torch.Tensor:
        nonlocal left
        left -= 1
        if not left:
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
            engine.generate([TOKENS])
        with pytest.raises(EngineFailedError):
            engine.reload_weights(second)


def test_weights_that_cannot_be_quantised_end_the_engine(base: TinyModel, write: Write) -> None:
    second = write()
    path = second / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(tensors, path)
    with opened(base.directory, weight_dtype="int8") as engine:
        with pytest.raises(EngineFailedError, match=r"reload_weights failed.*down_proj"):
            engine.reload_weights(second)
        assert not engine.stats()["healthy"]


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_weights_are_in_memory_one_at_a_time(
    base: TinyModel, write: Write, monkeypatch: pytest.MonkeyPatch, mode: str
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

    with opened(base.directory, mode=mode) as engine:
        monkeypatch.setattr(OpenedSource, "weights", watched)
        engine.reload_weights(write())
        assert seen == len(fused_layout(engine.model_config))


def test_needs_an_engine_without_requests(base: TinyModel, write: Write) -> None:
    second = write()
    with opened(second) as fresh:
        expected = fresh.generate([TOKENS], greedy(30))[0].token_ids
    with opened(base.directory) as engine:
        engine.add_request(TOKENS, greedy(30))
        engine.step()
        with pytest.raises(RequestError, match="reload_weights needs an idle engine"):
            engine.reload_weights(second)
        (output,) = run(engine).values()
        assert output.token_ids == base.greedy([TOKENS], 30)[0]
        engine.reload_weights(second)
        assert engine.generate([TOKENS], greedy(30))[0].token_ids == expected


def test_refuses_to_run_within_a_step(
    base: TinyModel, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(base.directory) as engine, unchanged(engine):
        launch = engine._loop.runner.launch

        def reenter(*args: Any) -> Any:
            with pytest.raises(EngineBusyError):
                engine.reload_weights(base.directory)
            return launch(*args)

        with monkeypatch.context() as patch:
            patch.setattr(engine._loop.runner, "launch", reenter)
            engine.generate([TOKENS], greedy(2))


def test_requests_of_other_threads_see_one_model(base: TinyModel, write: Write) -> None:
    """A request runs on the old weights or on the new ones."""
    second = write()
    known = [base.greedy([TOKENS], 6)[0]]
    with opened(second) as fresh:
        known.append(fresh.generate([TOKENS], greedy(6))[0].token_ids)
    with opened(base.directory) as engine:
        ended, found = threading.Event(), list[list[int]]()

        def client() -> None:
            while not ended.is_set():
                found.append(engine.generate([TOKENS], greedy(6))[0].token_ids)
                ended.wait(0.002)

        client_thread = threading.Thread(target=client)
        client_thread.start()
        reloads = 0
        while reloads < 10:
            try:
                engine.reload_weights((second, base.directory)[reloads % 2])
                reloads += 1
            except RequestError:
                ended.wait(0.001)
        ended.set()
        client_thread.join()
        assert found
        assert all(tokens in known for tokens in found)
        engine.check_integrity()


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


def test_any_order(tiny: Callable[[str], TinyModel], write: Write) -> None:
    sources = {"first": tiny("micro").directory, "second": write("micro")}
    sources |= {"deeper": write("micro", num_hidden_layers=2), "lost": write("micro")}
    (sources["lost"] / "model.safetensors").unlink()
    with opened(sources["first"]) as first, opened(sources["second"]) as second:

        class Machine(Reloads):
            pass

        Machine.sources, Machine.fresh = sources, {"first": first, "second": second}
        limits = settings(max_examples=8, stateful_step_count=25)
        run_state_machine_as_test(Machine, settings=limits)  # type: ignore[no-untyped-call]
