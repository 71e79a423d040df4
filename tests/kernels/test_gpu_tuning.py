"""Sizes of kernels: by default, those that are timed, the file of the tuned ones, and the tuner."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels import Experts, Routing
from stepgraph.runtime.kernels.ops.activation import Activate
from stepgraph.runtime.kernels.ops.linear import LinearTensors
from stepgraph.runtime.kernels.triton import experts as tiles
from stepgraph.runtime.kernels.triton import tuning
from stepgraph.runtime.kernels.triton.kernel_calls import num_multiprocessors, record_kernel_calls
from stepgraph.runtime.kernels.triton.linear import (
    EXPERT_PRODUCTS,
    ROW_CLASSES,
    LinearConfig,
)
from stepgraph.runtime.kernels.triton.linear_kernels import gate_up
from stepgraph.runtime.kernels.triton.tuning import (
    Product,
    Tuned,
    best_config,
    bounded_prefetch,
    candidate_configs,
    default_config,
)
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import PRESETS
from stepgraph.runtime.tools import tune

from ..rigs.expert_cases import make_mixture
from ..rigs.tiny_models import Tiny

CPU, META = torch.device("cpu"), torch.device("meta")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
KEY = Product("expert_down", 4, 8192, 2048, BF16, torch.int8, META, 8, 2)
TUNED = Tuned(LinearConfig(8, 512, 4, prefetch=8192), 15.6, 17.25)
SHAPES = ((3072, 2048), (8192, 2048), (2048, 8192), (1024, 3072), (4096, 14336), (37, 21), (1, 1))
MIXTURES = {
    name: op
    for name, config in PRESETS.items()
    for op in model_plan(config).operations
    if isinstance(op, Experts)
}


# Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["norm_linear", "gate_up", "residual_linear"])
def test_candidates_are_launchable(kernel: str) -> None:
    for rows, shape, weight_dtype, tight in itertools.product(
        ROW_CLASSES, SHAPES, (torch.int8, BF16, torch.float32), (False, True)
    ):
        product = Product(kernel, rows, *shape, BF16, weight_dtype, META)
        configs = candidate_configs(product, 132, tight)
        assert configs[0] == default_config(product, 132, tight)
        assert len(set(configs)) == len(configs)
        for size in itertools.chain(*((config.block_n, config.block_k) for config in configs)):
            assert size >= 1
            assert not size & (size - 1)


def prefetched(config: LinearConfig, n: int, k: int) -> int:
    """The rows of gate that its kernel is compiled to request."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=BF16, device=META)

    silu = Activate(name="activate", function="silu", features=n)
    with record_kernel_calls() as calls:
        linear = LinearTensors(empty(2 * n, k))
        gate_up(empty(1, k), linear, empty(1, n), activate=silu, config=config)
    amount: int = calls[0].options["PREFETCH"]
    return amount


def test_prefetch_is_rounded_to_what_kernels_request() -> None:
    config, product = LinearConfig(16, 256), Product("gate_up", 1, 8192, 2048, BF16, BF16, META)
    assert prefetched(config, 8192, 2048) == 0
    assert prefetched(bounded_prefetch(config, product, 24 << 20), 8192, 2048) == 6
    assert prefetched(bounded_prefetch(config, product, 64 << 20), 8192, 2048) == 16
    assert prefetched(replace(config, prefetch=1 << 30), 8192, 2048) == 16
    assert prefetched(replace(config, prefetch=1 << 30), 8192, 2047) == 0, "rows are not aligned"


def test_sizes_are_chosen_for_the_device_that_launches_are_recorded_for() -> None:
    """Below compute capability 9 as where something is added first: kernels take more registers."""
    product = Product("gate_up", 4, 8192, 2048, BF16, BF16, META)
    with record_kernel_calls(80):
        older = best_config(product)
    with record_kernel_calls(90):
        assert best_config(product, pending=True) == older
        assert best_config(product) != older


def sizes_of(
    op: Experts, tokens: int, weight: torch.dtype, device: torch.device
) -> tiles.ExpertSizes:
    scales = torch.empty(0, 0) if weight == torch.float8_e4m3fn else None
    stored = torch.empty(0, dtype=weight, device=device)
    return tiles.ExpertSizes.of(op, tokens, BF16, LinearTensors(stored, scales))


@pytest.mark.parametrize("op", MIXTURES.values(), ids=MIXTURES)
def test_sizes_of_experts_can_run(op: Experts) -> None:
    for tokens, kernel, weight in itertools.product(
        (1, 2, 4, 8, 32, 256), EXPERT_PRODUCTS, (BF16, torch.int8, torch.float8_e4m3fn)
    ):
        sizes = sizes_of(op, tokens, weight, META)
        assert tokens <= 4 or sizes.default_kind == "blocks"
        configs = tiles.candidate_tiles(kernel, sizes)
        assert configs[0] == tiles.default_tiles(kernel, sizes)
        assert len(set(configs)) == len(configs) > 4
        kinds = {config.kind for config in configs}
        assert kinds == ({"pairs", "blocks"} if tokens <= 4 else {"blocks"})
        for config in configs:
            assert config.block_n >= 2  # a row of gate and one of up
            assert config.kind == "pairs" or min(config.block_k, config.block_n) >= 32
            assert not sizes.scale_blocks or config.block_k <= 128


def test_tuned_sizes_of_experts_are_of_one_kind() -> None:
    sizes = sizes_of(make_mixture(Routing(top_k=2)).op, 3, BF16, DEVICE)
    (first, second), default = EXPERT_PRODUCTS, tiles.default_tiles
    assert [config.kind for config in tiles.expert_tiles(sizes)] == ["pairs", "pairs"]
    tall, blocks = LinearConfig(32, 64, 8, "pairs", 3), LinearConfig(64, 32, 4, "blocks", 2)
    tuning.store({sizes.key(second): Tuned(tall, 1.0, 2.0)})
    assert tiles.expert_tiles(sizes) == (default(first, sizes, "pairs"), tall)
    tuning.store({sizes.key(first): Tuned(blocks, 1.0, 2.0)})
    assert tiles.expert_tiles(sizes) == (blocks, default(second, sizes, "blocks"))
    assert tiles.expert_tiles(replace(sizes, tokens=4)) == tiles.expert_tiles(sizes)
    assert tiles.expert_tiles(replace(sizes, tokens=2))[0].kind == "pairs"


# The file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", Product._fields)
def test_what_is_stored_is_found_under_its_key_alone(field: str) -> None:
    changes = {"kernel": "expert_gate_up", "dtype": torch.float16, "weight_dtype": BF16, "rows": 8}
    changes |= {"device": CPU, "grouped": True}
    other = KEY._replace(**{field: changes.get(field, 1)})
    assert tuning.lookup(KEY, list) is None
    path = tuning.store({KEY: TUNED})
    assert path == tuning.tuning_file()
    assert tuning.lookup(other, list) is None
    better = replace(TUNED, config=LinearConfig(16, 256, 8))
    tuning.store({other: better})
    assert tuning.lookup(KEY, list) == TUNED.config
    assert tuning.lookup(other, list) == better.config
    path.unlink()
    assert tuning.lookup(KEY, list) == TUNED.config, "an engine's choices stay"


def test_the_best_is_what_was_tuned_or_the_default() -> None:
    product = Product("residual_linear", 2, 96, 64, BF16, torch.int8, CPU)
    default = default_config(product, num_multiprocessors(CPU))
    assert best_config(product) == default != TUNED.config
    tuning.store({product: TUNED})
    assert best_config(product) == TUNED.config


def changed(**changes: Any) -> str:
    entry = {**dataclasses.asdict(TUNED), **changes}
    return json.dumps({"version": tuning.VERSION, "entries": {"name": entry}})


FOREIGN = [
    "{",
    '{"version": 99, "entries": []}',
    f'{{"version": {tuning.VERSION}, "entries": [5]}}',
    changed(microseconds=None),
    changed(config={"block_m": 8}),
]


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_a_file_that_is_not_understood(content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tuning.tuning_file()
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with caplog.at_level(logging.WARNING, logger="stepgraph.runtime"):
        for _ in range(3):
            assert tuning.lookup(KEY, list) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    tuning.store({KEY: TUNED})
    assert tuning.lookup(KEY, list) == TUNED.config


# The tuner ---------------------------------------------------------------------------------------


@pytest.fixture(name="small_steps")
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that an interpreter runs in little time, and few candidates."""
    monkeypatch.setattr(tune, "CONTEXT", 20)
    monkeypatch.setattr(tune, "LAYERS", 1)
    candidates, of_experts = tuning.candidate_configs, tiles.candidate_tiles
    monkeypatch.setattr(tuning, "candidate_configs", lambda *sizes: candidates(*sizes)[:4:3])
    monkeypatch.setattr(tiles, "candidate_tiles", lambda *a, **k: of_experts(*a, **k)[:4:3])


def last_is_fastest(
    steps: Sequence[Callable[[], torch.Tensor]], reset: Callable[[], None]
) -> list[float]:
    return [20.0 - i for i in range(len(steps))]


@pytest.mark.parametrize("variant", ["micro", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_tuner_stores_the_fastest_right_configuration_of_each_product(
    tiny: Tiny,
    small_steps: None,
    variant: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = iter([0.0, float("nan"), *[0.0] * 99])  # the second one of the first product is wrong
    monkeypatch.setattr(tune, "relative_error", lambda *_: torch.tensor(next(errors)))
    arguments = ["--model", str(tiny(variant).directory), "--rows", "1"]
    assert tune.main(arguments, timer=last_is_fastest, device=DEVICE) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"{len(lines)} choices are in {tuning.tuning_file()}"
    entries = json.loads(tuning.tuning_file().read_text())["entries"]
    expected = {"norm_linear", "residual_linear"}
    expected |= {*EXPERT_PRODUCTS} if variant == "mixtral" else {"gate_up"}
    assert expected <= {name.split()[0] for name in entries}
    first, *others = entries.values()
    assert first["microseconds"] == first["default_microseconds"]
    assert all(entry["microseconds"] < entry["default_microseconds"] for entry in others)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("preset:none", "no preset is called 'none'"),
        ("preset:mla-small", "preset:mla-small: layers with latent attention"),
    ],
)
def test_what_cannot_be_tuned(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--model", model], timer=last_is_fastest, device=CPU) == 1
    assert message in capsys.readouterr().err
    assert not tuning.tuning_file().exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tuner_times_captured_steps_on_a_device(small_steps: None) -> None:
    assert tune.main(["--model", "demo", "--rows", "1", "8"]) == 0
    for entry in json.loads(tuning.tuning_file().read_text())["entries"].values():
        assert 1 < entry["microseconds"] <= entry["default_microseconds"] < 1e4
