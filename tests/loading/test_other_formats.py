"""Models in formats that are not read: the error has what it is in `code`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stepgraph.runtime import CheckpointError
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.loading.checkpoint_files import read_model_config
from stepgraph.runtime.loading.drafter_loading import find_drafter
from stepgraph.runtime.loading.loader import read_config, resolve_source

from ..rigs.tiny_models import TinyModel

PEFT = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.2-1B"}
MODEL_OPT = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
TENSORS = b"safetensors"
Files = dict[str, Any]
FILES: dict[str, tuple[str, Files]] = {
    "peft": ("peft", {"adapter_config.json": PEFT, "adapter_model.safetensors": TENSORS}),
    "mistral": ("mistral", {"params.json": {}, "consolidated.safetensors": TENSORS}),
    "meta": ("meta", {"params.json": {}, "consolidated.00.pth": b""}),
    "pickle": ("pickle", {"pytorch_model-00001-of-00002.bin": b""}),
    "onnx": ("no_config", {"onnx/model.onnx": b""}),
    "empty": ("no_config", {}),
    "tokenizer": ("no_config", {"tokenizer.json": {}}),
}
"""Directories without `config.json`."""
BESIDE: dict[str, tuple[str, Files, Files]] = {
    "peft": ("peft", {}, {"adapter_config.json": PEFT, "model.safetensors": TENSORS}),
    **{n: ("pickle", {}, {n: b""}) for n in ("pytorch_model.bin", "model.pt")},
    "meta": ("meta", {}, {"consolidated.00.pth": b""}),
    "tensorflow": ("no_weights", {}, {"tf_model.h5": b""}),
    "no weights": ("no_weights", {}, {}),
    "shards without index": ("no_weights", {}, {"model-00001-of-00002.safetensors": TENSORS}),
    "gptq": ("quantized", {"quantization_config": {"quant_method": "gptq", "bits": 3}}, {}),
    "hqq": ("quantized", {"quantization_config": {"quant_method": "hqq"}}, {}),
    "no method": ("quantized", {"quantization_config": 4}, {}),
}
"""Directories with the `config.json` of a model, and changes of it."""


def write(directory: Path, files: Files) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is TENSORS:
            save_file({"a": torch.zeros(2)}, path)
        else:
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            path.write_bytes(raw)
    return directory


def code(call: Callable[[], object]) -> str | None:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize("name", FILES)
def test_formats_of_directories(tmp_path: Path, base: TinyModel, name: str) -> None:
    expected, files = FILES[name]
    write(tmp_path, files)
    assert code(lambda: resolve_source(str(tmp_path))) == expected
    target = read_config(base.directory)
    assert code(lambda: find_drafter(str(tmp_path), target)) == expected


def opened(directory: Path, model_impl: str) -> None:
    found = resolve_source(directory, model_impl=model_impl)
    assert found.directory is not None
    CheckpointReader(found.directory).close()


@pytest.mark.parametrize("model_impl", ["auto", "native", "transformers"])
@pytest.mark.parametrize("name", BESIDE)
def test_formats_with_a_config(base: TinyModel, tmp_path: Path, name: str, model_impl: str) -> None:
    expected, changes, files = BESIDE[name]
    config = json.loads((base.directory / "config.json").read_text())
    write(tmp_path, files | {"config.json": config | changes})
    assert code(lambda: opened(tmp_path, model_impl)) == expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("pytorch_model.bin", b"PK", "pickle"),
        ("model.safetensors", TENSORS, "file"),
        ("notes.txt", b"hello", "file"),
    ],
)
def test_formats_of_files(tmp_path: Path, name: str, content: Any, expected: str) -> None:
    path = write(tmp_path, {name: content}) / name
    for source in (path, str(path)):
        assert code(lambda source=source: resolve_source(source)) == expected  # type: ignore[misc]


@pytest.mark.parametrize(
    ("method", "changes", "files"),
    [
        ("mlx", {"quantization": {"group_size": 64, "bits": 4}}, {}),
        ("mlx", {"quantization_config": {"group_size": 64, "bits": 4}}, {}),
        ("modelopt", {}, {"hf_quant_config.json": MODEL_OPT}),
        ("compressed-tensors", {"compression_config": {"format": "pack-quantized"}}, {}),
        ("fp8", {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, {}),
    ],
)
def test_methods_that_a_config_says_in_another_way(
    base: TinyModel, tmp_path: Path, method: str, changes: Files, files: Files
) -> None:
    config = json.loads((base.directory / "config.json").read_text())
    write(tmp_path, files | {"config.json": config | changes})
    assert read_model_config(tmp_path)["quantization_config"]["quant_method"] == method


def test_formats_of_the_cache_alone_are_accepted(base: TinyModel, tmp_path: Path) -> None:
    """ModelOpt also writes its file for a quantised cache of keys and values."""
    directory = shutil.copytree(base.directory, tmp_path / "model")
    settings = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    write(directory, {"hf_quant_config.json": settings})
    opened(directory, "auto")
