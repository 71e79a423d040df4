"""GGUF files that are damaged or contradict themselves, and where files are found."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import pack
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime import CheckpointError, ConfigError
from stepgraph.runtime.loading.gguf_file import GGUFFile, open_gguf
from stepgraph.runtime.loading.loader import resolve_source

from ..rigs.engine_rig import greedy, opened
from ..rigs.gguf_files import write_gguf
from ..rigs.tiny_models import Tiny, TinyModel

STRING, LIST, U32 = 8, 9, 4


def string(text: str) -> bytes:
    raw = text.encode()
    return pack("<Q", len(raw)) + raw


def file_of(
    keys: Sequence[tuple[str, int, bytes]] = (),
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]] = (),
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """The bytes of a file: keys with type and value, tensors with dimensions, type and offset."""
    head = b"GGUF" + pack("<IQQ", version, *(counts or (len(tensors), len(keys))))
    head += b"".join(string(key) + pack("<I", kind) + value for key, kind, value in keys)
    for name, dimensions, kind, offset in tensors:
        head += string(name) + pack("<I", len(dimensions))
        head += b"".join(pack("<Q", d) for d in dimensions) + pack("<IQ", kind, offset)
    return head + b"\0" * (-len(head) % 32) + data


NUMBER = ("a", U32, pack("<I", 1))
BAD: dict[str, bytes] = {
    "empty": b"",
    "magic": b"GGML" + file_of()[4:],
    "version 1": file_of(version=1),
    "version 4": file_of(version=4),
    "big-endian": b"GGUF" + pack(">IQQ", 3, 0, 0),
    "many keys": file_of([NUMBER], counts=(0, 2**63)),
    "many tensors": file_of(counts=(2**40, 0), data=b"\0" * 64),
    "key twice": file_of([NUMBER, NUMBER]),
    "key not UTF-8": b"GGUF" + pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xff" + pack("<II", U32, 1),
    "long string": file_of([("a", STRING, pack("<Q", 2**62))]),
    "long list": file_of([("a", LIST, pack("<IQ", U32, 2**61))]),
    "long list of strings": file_of([("a", LIST, pack("<IQ", STRING, 2**40))]),
    "list of lists": file_of([("a", LIST, pack("<IQ", LIST, 1) + pack("<IQ", U32, 0))]),
    "unknown type of a value": file_of([("a", 99, b"")]),
    "tensor twice": file_of([], [("a", (1,), 0, 0)] * 2, bytes(32)),
    "no dimensions": file_of([], [("a", (), 0, 0)], bytes(32)),
    "five dimensions": file_of([], [("a", (1,) * 5, 0, 0)], bytes(32)),
    "no elements": file_of([], [("a", (0, 4), 0, 0)], bytes(32)),
    "2**40 as a dimension": file_of([], [("a", (2**40,), 0, 0)], bytes(32)),
    "product beyond 64 bits": file_of([], [("a", (2**40, 2**40), 0, 0)], bytes(32)),
    "beyond the end": file_of([], [("a", (8,), 0, 32)], bytes(32)),
    "odd offset": file_of([], [("a", (4,), 0, 3)], bytes(64)),
    "unknown type": file_of([], [("a", (256,), 99, 0)], bytes(64)),
    "IQ2_XXS": file_of([], [("a", (256,), 16, 0)], bytes(256)),
    "part of a block": file_of([], [("a", (48, 2), 8, 0)], bytes(256)),
    "alignment": file_of([("general.alignment", U32, pack("<I", 3))]),
    "alignment 0": file_of([("general.alignment", U32, pack("<I", 0))]),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_file_is_refused_at_once(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(BAD[case])
    began = time.thread_time()
    with pytest.raises(CheckpointError) as caught:
        GGUFFile(path)
    assert time.thread_time() - began < 1
    assert str(path) in str(caught.value)
    if case == "IQ2_XXS":
        assert case in str(caught.value)


@pytest.fixture(scope="module")
def whole(base: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model-F32.gguf"
    write_gguf(base, path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught, opened(path):
        pass
    return str(caught.value)


@given(data=st.data())
def test_changed_bytes_of_a_header(whole: Path, data: st.DataObject, tmp_path_factory: Any) -> None:
    """Any error is a typed one, and a file that was cut is refused."""
    raw = bytearray(whole.read_bytes())
    length = data.draw(st.integers(0, len(raw) - 1) | st.just(len(raw) - 1))
    path = tmp_path_factory.mktemp("changed") / "model.gguf"
    path.write_bytes(raw[:length])
    with pytest.raises(CheckpointError):
        GGUFFile(path)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with suppress(CheckpointError), opened(path):
        pass


@pytest.mark.parametrize(
    ("variant", "changes", "named"),
    [
        ("base", {"block_count": 9}, "block_count"),
        ("base", {"block_count": 2**31}, "block_count"),
        ("base", {"block_count": None}, "num_hidden_layers"),
        ("base", {"embedding_length": 64}, "model.embed_tokens.weight"),
        ("base", {"embedding_length": None}, "hidden_size"),
        ("base", {"feed_forward_length": 81}, "mlp.gate_proj"),
        ("base", {"attention__head_count": 5}, "num_attention_heads"),
        ("base", {"attention__head_count": [6, 6, 6]}, "attention.head_count"),
        ("base", {"attention__layer_norm_rms_epsilon": "small"}, "rms_norm_eps"),
        ("base", {"rope__scaling__type": 7}, "rope.scaling.type"),
        ("base", {"context_length": None}, "max_position_embeddings"),
        (
            "base",
            {"extra": {"blk.1.attn_q_norm.weight": np.ones(16)}},
            "layers.1.attn_q_norm.weight",
        ),
        ("mixtral", {"expert_count": 4}, "blk.0.ffn_"),
    ],
)
def test_metadata_that_contradicts_the_tensors(
    tiny: Tiny, tmp_path: Path, variant: str, changes: dict[str, Any], named: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny(variant), path, **changes)
    message = refused(path)
    assert str(path) in message
    assert named in message


def test_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of([("general.architecture", STRING, string("mamba"))]))
    assert "'mamba'" in refused(path)


def test_scale_that_is_not_a_number(tiny: Tiny, tmp_path: Path) -> None:
    """Found when the tensor is read."""
    kind, path = gguf.GGMLQuantizationType.Q8_0, tmp_path / "model.gguf"
    with np.errstate(over="ignore"):  # scales are float16
        write_gguf(tiny("wide_groups"), path, lambda name, w: (gguf.quantize(w * 1e9, kind), kind))
    message = refused(path)
    assert str(path) in message
    assert "token_embd.weight" in message


def test_transformers_reads_none(whole: Path) -> None:
    with pytest.raises(ConfigError):
        resolve_source(whole, model_impl="transformers")


def split(whole: Path, directory: Path) -> list[Path]:
    """Write the tensors of a file to two parts: the first one has the metadata, no tensors."""
    raw = whole.read_bytes()
    directory.mkdir(exist_ok=True)
    paths = [directory / f"model-Q-0000{i}-of-00002.gguf" for i in (1, 2)]
    shutil.copy(whole, paths[1])
    keys = int.from_bytes(raw[16:24], "little")
    end = raw.index(string("output_norm.weight"))  # the first tensor
    paths[0].write_bytes(raw[:8] + pack("<QQ", 0, keys) + raw[24:end])
    return paths


class TestPlaces:
    def test_directory_with_one(self, whole: Path, base: TinyModel, tmp_path: Path) -> None:
        shutil.copy(whole, tmp_path / "model.gguf")
        shutil.copy(whole, tmp_path / "mmproj-model.gguf")
        shutil.copy(base.directory / "config.json", tmp_path)  # as many repositories have
        source = resolve_source(str(tmp_path))
        assert source.directory == tmp_path / "model.gguf"
        shutil.copy(whole, tmp_path / "other.gguf")
        with pytest.raises(CheckpointError):
            resolve_source(tmp_path)
        shutil.copy(base.directory / "model.safetensors", tmp_path)
        assert resolve_source(tmp_path).directory == tmp_path

    def test_split_file(self, whole: Path, base: TinyModel, tmp_path: Path) -> None:
        paths = split(whole, tmp_path)
        assert open_gguf(paths[0]).tensors.keys() == GGUFFile(whole).tensors.keys()
        for place in (tmp_path, *paths):
            assert resolve_source(place).directory == paths[0]
        prompts = base.prompts(5, 9)
        with opened(paths[1]) as engine:
            outputs = engine.generate(prompts, greedy(8))
        assert [output.token_ids for output in outputs] == base.greedy(prompts, 8)
        paths[1].unlink()
        assert paths[1].name in refused(paths[0])

    def test_parts_of_several_models(self, whole: Path, tmp_path: Path) -> None:
        paths = split(whole, tmp_path)
        shutil.copy(whole, paths[0])
        assert str(paths[1]) in refused(tmp_path)

    def test_hub(self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[list[str]] = []

        def download(
            repository: str, *, allow_patterns: list[str], local_files_only: bool = False
        ) -> str:
            assert repository == "org/model"
            if not local_files_only:
                asked.append(allow_patterns)
                (tmp_path / "Q4_K_M").mkdir(exist_ok=True)
                for name in ("Q4_K_M/m-Q4_K_M", "m-q8_0", "m-Q4_K_M-extra", "m.Q4_K_S"):
                    shutil.copy(whole, tmp_path / f"{name}.gguf")
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        (tmp_path / "m-Q4_K_M-extra.gguf").touch()
        for name, found in (("q8_0", "m-q8_0"), ("Q8_0", "m-q8_0"), ("Q4_K_S", "m.Q4_K_S")):
            source = resolve_source(f"org/model:{name}")
            assert source.directory == tmp_path / f"{found}.gguf"
        assert len(asked) == 1
        assert "*q8_0*.gguf" in asked[0]
        for name in ("Q5_K", "Q4_K_M"):  # none, and two
            with pytest.raises(CheckpointError):
                resolve_source(f"org/model:{name}")

    def test_weights_are_reloaded(self, whole: Path, base: TinyModel) -> None:
        prompts = base.prompts(7)
        with opened("preset:smollm2-135m", max_model_len=64) as engine, pytest.raises(ConfigError):
            engine.reload_weights(whole)
        with opened(base.directory) as engine:
            before = engine.generate(prompts, greedy(6))[0].token_ids
            engine.reload_weights(whole)
            assert engine.generate(prompts, greedy(6))[0].token_ids == before
