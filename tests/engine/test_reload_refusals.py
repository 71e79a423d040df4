"""`Engine.reload_weights` of what cannot be loaded: refused, or the engine has failed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime.errors import CheckpointError, ConfigError, EngineFailedError
from stepgraph.runtime.loading.checkpoint import CheckpointReader

from ..rigs.reload_rig import TOKENS, Write, make_write, opened, unchanged  # noqa: F401
from ..rigs.tiny_models import Tiny, TinyModel, changed_checkpoint

ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "base": [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": ROPE},
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
    with opened(tiny(variant).directory, block_size=4) as engine:
        for changes in DIFFERENT[variant]:
            second = write(variant, **changes)
            with unchanged(engine), pytest.raises(ConfigError):
                engine.reload_weights(second)


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop(directory: Path) -> None:
    changed_checkpoint(directory, directory, lambda tensors: tensors.pop("model.norm.weight"))


def reshape(directory: Path) -> None:
    changes = {"model.norm.weight": torch.ones(47)}
    changed_checkpoint(directory, directory, lambda tensors: tensors.update(changes))


def spoil_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


def test_a_damaged_checkpoint_is_refused(base: TinyModel, write: Write) -> None:
    with opened(base.directory, block_size=4) as engine:
        for damage in (cut, drop, reshape, spoil_tokenizer, shutil.rmtree):
            second = write()
            damage(second)
            with unchanged(engine), pytest.raises(CheckpointError):
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
