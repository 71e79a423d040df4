"""Prompts of any type: token ids are read as plain integers, the rest ends its own request."""

from __future__ import annotations

import array
import collections
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from stepgraph.runtime import Engine, PromptEmbeds, RequestError
from stepgraph.runtime.loading.tokenizer import load_tokenizer
from tokenizers import Tokenizer

from ..rigs.engine_rig import greedy, opened
from ..rigs.tiny_models import TinyModel

GREEDY = greedy(4)


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], TinyModel]) -> Any:
    with opened(tiny("text").directory, max_model_len=64) as engine:
        yield engine
        assert not engine.has_unfinished()
        engine.check_integrity()


def fail(*_: object) -> NoReturn:
    raise ZeroDivisionError("no")


class Raises:
    """Raises whatever is asked of it."""

    __len__ = __iter__ = __index__ = __int__ = __eq__ = __repr__ = __str__ = fail  # type: ignore
    __getitem__ = __bool__ = __hash__ = __contains__ = __array__ = fail  # type: ignore


GOOD = [5, 6, 7]
ACCEPTED: dict[str, Any] = {
    "tuple": (5, 6, 7),
    "range": range(5, 8),
    "array": array.array("i", GOOD),
    "numpy": np.array(GOOD),
    "numpy_uint8": np.array(GOOD, dtype=np.uint8),
    "numpy_strided": np.arange(20)[5:8],
    "numpy_big_endian": np.array(GOOD, dtype=">i4"),
    "numpy_scalars": [np.int64(5), np.uint8(6), 7],
    "tensor": torch.tensor(GOOD),
    "tensor_int32": torch.arange(20, dtype=torch.int32)[5:8],
}
REFUSED: dict[str, Any] = {
    "none": None,
    "bytes": b"abc",
    "memoryview": memoryview(b"abc"),
    "set": {1, 2},
    "dict": {1: 2},
    "generator": (i for i in range(3)),
    "deque": collections.deque([1, 2]),
    "booleans": [True, False],
    "floats": [1.0, 2.0],
    "nested": [[1, 2], [3]],
    "nan": float("nan"),
    "raises": Raises(),
    "raises_inside": [1, Raises()],
    "huge": [10**5000],
    "negative": [-1],
    "range_without_end": range(10**400),
    "numpy_float": np.array([1.0]),
    "numpy_bools": [np.bool_(True)],
    "numpy_object": np.array([1, None], dtype=object),
    "numpy_2d": np.ones((2, 2), dtype=np.int64),
    "numpy_0d": np.array(3),
    "numpy_masked": np.ma.array([1, 2], mask=[0, 1]),
    "numpy_long": np.ones(10**7, dtype=np.int64),
    "tensor_float": torch.ones(3),
    "tensor_2d": torch.ones(2, 2, dtype=torch.int64),
    "tensor_sparse": torch.ones(3, dtype=torch.int64).to_sparse(),
    "tensor_meta": torch.ones(3, dtype=torch.int64, device="meta"),
    "tensors": [torch.tensor(1), torch.tensor(2)],
    "type": type("T" * 10**6, (), {})(),
    "embeds": PromptEmbeds([1, 2], Raises()),  # type: ignore[arg-type]
    "surrogate": "a\ud800",
    "empty": "",
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_integers_of_many_types(engine: Engine, kind: str) -> None:
    (expected,) = engine.generate([GOOD], GREEDY)
    (output,) = engine.generate([ACCEPTED[kind]], GREEDY)
    assert output.prompt_token_ids == GOOD
    assert all(type(token) is int for token in output.prompt_token_ids)
    assert output.token_ids == expected.token_ids


def test_no_prompt_harms_the_others(engine: Engine) -> None:
    (expected,) = engine.generate([GOOD], GREEDY)
    prompts = [GOOD, *REFUSED.values(), GOOD]
    with pytest.warns(UserWarning, match="prompts"):
        outputs = engine.generate(prompts, GREEDY)
    for output in (outputs[0], outputs[-1]):
        assert output.token_ids == expected.token_ids
    for output in outputs[1:-1]:
        assert type(output.error) is RequestError
        assert len(str(output.error)) < 600


def test_long_lists_are_cheap_to_refuse(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.add_request([Raises()] * 5_000_000)  # not one of them is looked at


def test_text_too_long_is_not_tokenised(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.tokenizer is not None
    monkeypatch.setattr(type(engine.tokenizer), "encode", fail)
    with pytest.raises(RequestError) as caught:
        engine.add_request("the café " * 100_000)
    assert caught.value.code == "context_length_exceeded"


def test_tokens_without_an_embedding(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    directory = shutil.copytree(tiny("text").directory, tmp_path / "checkpoint")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([*(f"<|{i}|>" for i in range(32)), "<|new|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    loaded = load_tokenizer(directory)
    assert loaded is not None
    assert max(loaded.encode("a<|new|>")) >= vocab_size
    with opened(directory) as engine:
        with pytest.warns(UserWarning, match="prompts"):
            bad, good = engine.generate(["a<|new|>b", "a"], GREEDY)
        assert "'<|new|>'" in str(bad.error)
        assert len(good.token_ids) == 4
        engine.check_integrity()
