"""Checkpoints: fused weights equal transformers', and every way a file can be broken is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.loading.loader import (
    CheckpointReader,
    fused_layout,
    iter_weights,
    random_weights,
    read_config,
    resolve_source,
)
from stepgraph.runtime.models.presets import PRESETS
from stepgraph.runtime.tools.memory_report import explain_memory
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 22, "num_key_value_heads": 1},
    "one kv head each": {"num_key_value_heads": 4, "dtype": "float16"},
}


def save_model(directory: Path, *, shard: str = "5GB", **changes: Any) -> LlamaForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    config = LlamaConfig(**(settings | changes))
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).to(getattr(torch, str(config.dtype).removeprefix("torch.")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-2.0, 2.0)
    model.generation_config = GenerationConfig(eos_token_id=[2, 5])
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def load_all(
    directory: Path, dtype: torch.dtype = torch.float32, *, progress: bool = False
) -> dict[str, torch.Tensor]:
    with CheckpointReader(directory) as reader:
        return dict(iter_weights(reader, read_config(directory), dtype, progress=progress))


def reference(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The fused weights, assembled from the modules of transformers' model."""
    fused = {"embed_tokens.weight": model.model.embed_tokens.weight}
    for i, layer in enumerate(model.model.layers):
        attention, mlp, ours = layer.self_attn, layer.mlp, f"layers.{i}"
        fused[f"{ours}.input_norm.weight"] = layer.input_layernorm.weight
        fused[f"{ours}.mlp_norm.weight"] = layer.post_attention_layernorm.weight
        parts = {
            "attention.qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
            "attention.output": (attention.o_proj,),
            "gate_up": (mlp.gate_proj, mlp.up_proj),
            "down": (mlp.down_proj,),
        }
        for name, modules in parts.items():
            fused[f"{ours}.{name}.weight"] = torch.cat([m.weight for m in modules])
            if modules[0].bias is not None:
                fused[f"{ours}.{name}.bias"] = torch.cat([m.bias for m in modules])
    fused["norm.weight"] = model.model.norm.weight
    if not model.config.tie_word_embeddings:
        fused["lm_head.weight"] = model.lm_head.weight
    return {name: tensor.detach() for name, tensor in fused.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_model(directory)
    return directory


@pytest.fixture(scope="module")
def saved_in_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    save_model(directory, shard="8KB")
    return directory


@pytest.fixture
def single(saved: Path, tmp_path: Path) -> Path:
    """A copy of a one-file checkpoint, to be broken."""
    return shutil.copytree(saved, tmp_path / "single")


@pytest.fixture
def sharded(saved_in_shards: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint in several files, to be broken."""
    return shutil.copytree(saved_in_shards, tmp_path / "sharded")


def rewrite(path: Path, tensors: dict[str, torch.Tensor], *drop: str) -> None:
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    save_file(kept | tensors, path)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestWeights:
    @pytest.mark.parametrize("shard", ["5GB", "8KB"])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_equal_to_the_modules_of_transformers(
        self, tmp_path: Path, variant: str, shard: str
    ) -> None:
        model = save_model(tmp_path, shard=shard, **VARIANTS[variant])
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "8KB")
        loaded = load_all(tmp_path)
        expected = reference(model)
        layout = fused_layout(read_config(tmp_path))
        assert list(loaded) == list(layout)
        assert loaded.keys() == expected.keys()
        for name, tensor in loaded.items():
            assert tensor.shape == layout[name].shape
            assert tensor.is_contiguous()
            torch.testing.assert_close(tensor, expected[name].float(), rtol=0, atol=0)

    def test_cast_to_the_dtype_asked_for(self, single: Path) -> None:
        half = load_all(single, torch.float16)
        for name, tensor in load_all(single).items():
            torch.testing.assert_close(half[name], tensor.half(), rtol=0, atol=0)

    def test_harmless_extra_tensors(self, single: Path) -> None:
        shutil.rmtree(single)
        save_model(single, tie_word_embeddings=True)
        expected = load_all(single)
        extra = {
            "lm_head.weight": torch.randn(61, 32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4).double(),
        }
        rewrite(single / "model.safetensors", extra)
        loaded = load_all(single)
        assert loaded.keys() == expected.keys()
        torch.testing.assert_close(loaded, expected, rtol=0, atol=0)

    def test_progress_is_silent_without_a_terminal(
        self, saved: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert load_all(saved, progress=True).keys() == load_all(saved).keys()
        assert "".join(capfd.readouterr()).strip() == ""

    def test_progress_on_a_terminal(
        self, saved: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich: as if stderr were a terminal
        load_all(saved, progress=True)
        out, err = capfd.readouterr()
        assert out == ""
        assert "loading weights" in err
        assert "100%" in err


class TestContradictions:
    def refusal(self, directory: Path) -> str:
        """The message; it must come before any tensor is read."""
        with CheckpointReader(directory) as reader, pytest.raises(CheckpointError) as caught:
            iter_weights(reader, read_config(directory), torch.float32)
        assert str(directory) in str(caught.value)
        return str(caught.value)

    def test_all_kinds_in_one_message(self, single: Path) -> None:
        rewrite(
            single / "model.safetensors",
            {
                "model.norm.weight": torch.randn(33),
                "model.layers.7.mlp.up_proj.weight": torch.randn(40, 32),
                "model.layers.0.mlp.down_proj.weight": torch.randn(32, 40).double(),
            },
            "model.layers.1.self_attn.k_proj.weight",
        )
        lines = [line.strip() for line in self.refusal(single).splitlines()]
        assert "missing: model.layers.1.self_attn.k_proj.weight [16, 32]" in lines
        assert "shape: model.norm.weight expected [32], found [33]" in lines
        assert "unexpected: model.layers.7.mlp.up_proj.weight [40, 32]" in lines
        assert any("down_proj.weight in model.safetensors is F64" in line for line in lines)
        assert len(lines) == 5

    def test_long_lists_are_cut(self, single: Path) -> None:
        edit_json(single / "config.json", attention_bias=True, mlp_bias=True)
        lines = self.refusal(single).splitlines()
        assert lines[-1].strip() == "... and 4 more", "14 biases, the first ten by name"
        assert len(lines) == 1 + 10 + 1


MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 10,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 10, "attention_bias": True}),
    "gemma2": ("gemma2", {"num_key_value_heads": 2, "head_dim": 10}),
    "gemma3": ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 10}),
    "mla": ("deepseek_v2", MLA | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    "mla, compressed queries": ("deepseek_v3", MLA | {"q_lora_rank": 14, "attention_bias": True}),
}


def save_family(directory: Path, name: str) -> PreTrainedModel:
    model_type, changes = FAMILIES[name]
    config = AutoConfig.for_model(
        model_type,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        **changes,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-2.0, 2.0)
    model.save_pretrained(directory)
    return model


class TestFamilies:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_every_tensor_of_the_checkpoint_has_its_place(self, tmp_path: Path, name: str) -> None:
        model = save_family(tmp_path, name)
        source = {name: tensor.detach() for name, tensor in model.named_parameters()}
        layout = fused_layout(read_config(tmp_path))
        placed = [part for fused in layout.values() for part in fused.sources if part is not None]
        assert sorted(placed) == sorted(source)
        for ours, tensor in load_all(tmp_path).items():
            assert tensor.shape == layout[ours].shape
            parts = [
                torch.zeros(shape) if part is None else source[part]
                for part, shape in zip(
                    layout[ours].sources, layout[ours].source_shapes, strict=True
                )
            ]
            expected = torch.cat(parts).view(tensor.shape)
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_contradictions_are_named(self, tmp_path: Path, name: str) -> None:
        save_family(tmp_path, name)
        path = tmp_path / "model.safetensors"
        names = sorted(load_file(path))
        for missing in names[:: len(names) // 6]:
            kept = load_file(path)
            wrong = {missing: torch.randn(*kept[missing].shape, 2)}
            rewrite(path, {}, missing)
            with pytest.raises(CheckpointError, match=f"missing: {missing}"):
                load_all(tmp_path)
            rewrite(path, wrong)
            with pytest.raises(CheckpointError, match=f"shape: {missing} expected"):
                load_all(tmp_path)
            save_file(kept, path)
        rewrite(path, {"model.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 2)})
        with pytest.raises(CheckpointError, match=r"unexpected: .*experts\.gate_up_proj"):
            load_all(tmp_path)


class TestBrokenFiles:
    @pytest.mark.parametrize("size", [0, 4, 100, -1, -2000])
    def test_truncated(self, single: Path, size: int) -> None:
        path = single / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
            CheckpointReader(single)

    def test_git_lfs_pointer(self, single: Path) -> None:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
        (single / "model.safetensors").write_bytes(pointer)
        with pytest.raises(CheckpointError, match="git lfs pull"):
            CheckpointReader(single)

    def test_missing_shards_are_named(self, sharded: Path) -> None:
        first, second, *_ = sorted(sharded.glob("*.safetensors"))
        first.unlink()
        second.unlink()
        with pytest.raises(CheckpointError, match=f"{first.name}, {second.name}"):
            CheckpointReader(sharded)

    def test_index_names_a_tensor_that_no_shard_holds(self, sharded: Path) -> None:
        path = sharded / "model.safetensors.index.json"
        weight_map = json.loads(path.read_text())["weight_map"]
        shard = weight_map["model.norm.weight"]
        edit_json(path, weight_map=weight_map | {"model.extra.weight": shard})
        with pytest.raises(CheckpointError, match=rf"{shard} does not hold model\.extra\.weight"):
            CheckpointReader(sharded)

    def test_the_index_decides_between_duplicates(self, sharded: Path) -> None:
        expected = load_all(sharded)
        path = sharded / "model.safetensors.index.json"
        weight_map = json.loads(path.read_text())["weight_map"]
        for shard in set(weight_map.values()) - {weight_map["model.norm.weight"]}:
            rewrite(sharded / shard, {"model.norm.weight": torch.full((32,), torch.nan)})
        torch.testing.assert_close(load_all(sharded), expected, rtol=0, atol=0)

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
    def test_broken_index(self, sharded: Path, content: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
            CheckpointReader(sharded)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_pickles_are_refused_unread(self, single: Path, name: str) -> None:
        (single / "model.safetensors").rename(single / name)
        with pytest.raises(CheckpointError, match=f"(?s){name}.*safetensors.*save_pretrained"):
            CheckpointReader(single)

    def test_no_weights(self, single: Path) -> None:
        (single / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
            CheckpointReader(single)


class TestSource:
    @pytest.mark.parametrize("kind", [str, Path])
    def test_directory(self, saved: Path, kind: type) -> None:
        source = resolve_source(kind(saved))
        assert (source.name, source.directory) == (str(saved), saved)
        assert source.config == read_config(saved)

    def test_preset(self) -> None:
        source = resolve_source("preset:llama-3.2-1b")
        assert source.directory is None
        assert source.config is PRESETS["llama-3.2-1b"]

    @pytest.mark.parametrize("kind", [str, Path])
    def test_missing_directory(self, tmp_path: Path, kind: type) -> None:
        path = tmp_path / "nowhere"
        with pytest.raises(CheckpointError, match=rf"no checkpoint at {path}.*config\.json"):
            resolve_source(kind(path))

    def test_file_instead_of_a_directory(self, saved: Path) -> None:
        with pytest.raises(CheckpointError, match="must be a directory"):
            resolve_source(str(saved / "model.safetensors"))

    def test_directory_without_a_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"has no config\.json"):
            resolve_source(tmp_path)

    def test_hub_package_is_optional(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(CheckpointError, match=r"huggingface_hub.*stepgraph\[hub\]"):
            resolve_source("some-org/some-model")


class TestHub:
    """The hub without a network: what is in the local cache, laid out as huggingface_hub does."""

    @pytest.fixture(autouse=True)
    def _offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def cache(self, tmp_path: Path, checkpoint: Path) -> Path:
        repository = tmp_path / "cache" / "models--some-org--some-model"
        revision = "0" * 39 + "1"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(revision)
        return shutil.copytree(checkpoint, repository / "snapshots" / revision)

    @pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
    def test_incomplete_in_the_cache(
        self, tmp_path: Path, saved: Path, lost: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot = self.cache(tmp_path, saved)
        (snapshot / lost).unlink()
        find = huggingface_hub.snapshot_download

        def download(repository: str, *, local_files_only: bool = False, **settings: Any) -> str:
            if not local_files_only:
                shutil.copy(saved / lost, snapshot)
            return find(repository, local_files_only=True, **settings)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve_source("some-org/some-model").directory == snapshot

    def test_only_the_config_is_downloaded_where_that_is_enough(
        self, tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = tmp_path / "full"
        find = huggingface_hub.snapshot_download
        asked: list[list[str]] = []

        def download(
            repository: str, *, allow_patterns: list[str], local_files_only: bool = False
        ) -> str:
            if not local_files_only:
                asked.append(allow_patterns)
                wanted = [f for f in saved.iterdir() if any(map(f.match, allow_patterns))]
                shutil.rmtree(tmp_path / "cache", ignore_errors=True)
                shutil.rmtree(full, ignore_errors=True)
                full.mkdir()
                for file in wanted:
                    shutil.copy(file, full)
                self.cache(tmp_path, full)
            return find(repository, allow_patterns=allow_patterns, local_files_only=True)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        for _ in range(2):  # the second time it is in the cache
            source = resolve_source("some-org/some-model", config_only=True)
            assert source.config == read_config(saved)
        names = ["config.json", "generation_config.json"]
        assert asked == [names]
        assert source.directory is not None
        assert sorted(file.name for file in source.directory.iterdir()) == names
        assert "some-org/some-model in" in explain_memory(
            "some-org/some-model", EngineConfig(mode="eager", max_num_seqs=1), 1 << 30
        )
        assert asked == [names]
        # What was enough for the config is not taken for a whole checkpoint.
        resolve_source("some-org/some-model")
        assert asked == [names, ["*.json", "*.jinja", "*.safetensors"]]

    def test_not_in_the_cache(self) -> None:
        message = "'some-org/some-model' is neither a local directory nor complete .* downloaded"
        with pytest.raises(CheckpointError, match=message):
            resolve_source("some-org/some-model")


class TestRandomWeights:
    CONFIG = dataclasses.replace(PRESETS["smollm2-135m"], num_layers=2, vocab_size=4096)

    def test_names_shapes_and_distribution(self) -> None:
        layout = fused_layout(self.CONFIG)
        weights = dict(random_weights(self.CONFIG, torch.bfloat16, seed=3))
        assert list(weights) == list(layout)
        for name, tensor in weights.items():
            assert tensor.shape == layout[name].shape
            assert tensor.dtype == torch.bfloat16
            if name.endswith("norm.weight"):
                assert tensor.eq(1).all()
            else:
                assert abs(tensor.float().std().item() - 0.02) < 1e-4
                assert abs(tensor.float().mean().item()) < 2e-4

    def test_norms_that_are_offsets_are_zero(self) -> None:
        gemma = dataclasses.replace(
            PRESETS["gemma-3-1b"], num_layers=1, layer_types=(), vocab_size=64
        )
        norms = [t for n, t in random_weights(gemma, torch.bfloat16) if n.endswith("norm.weight")]
        assert len(norms) == 7
        assert not any(norm.any() for norm in norms)

    def test_parts_that_no_checkpoint_has_are_zero(self) -> None:
        latent = dataclasses.replace(
            PRESETS["mla-small"],
            num_layers=1,
            vocab_size=64,
            bos_token_id=1,
            eos_token_ids=(2,),
            attention_bias=True,
        )
        weights = dict(random_weights(latent, torch.float32))
        name = "layers.0.attention.q_kv.bias"
        parts = list(fused_layout(latent)[name].parts(weights[name]))
        assert [(source is None, bool(part.any())) for source, part in parts] == [
            (True, False),
            (False, True),
        ]

    def test_no_two_rows_and_no_two_layers_are_equal(self) -> None:
        weights = dict(random_weights(self.CONFIG, torch.bfloat16, seed=3))
        embedding = weights["embed_tokens.weight"]
        assert len(embedding[:, :16].float().unique(dim=0)) == len(embedding)
        assert not torch.equal(weights["layers.0.down.weight"], weights["layers.1.down.weight"])

    def test_depends_on_name_and_seed_only(self, saved: Path) -> None:
        config = read_config(saved)
        weights = dict(random_weights(config, torch.float32, seed=3))
        shallow = dataclasses.replace(config, num_layers=1, tie_word_embeddings=True)
        for name, tensor in random_weights(shallow, torch.float32, seed=3):
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)
        for name, tensor in random_weights(config, torch.float32, seed=4):
            assert name.endswith("norm.weight") or not torch.equal(tensor, weights[name])
