"""The thread pool of the C++ operators: exact results whatever the scheduler does to threads."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from stepgraph.runtime import ConfigError, EngineConfig, kernels
from stepgraph.runtime.kernels import Routing
from stepgraph.runtime.kernels.cpu import threads as rooms
from stepgraph.runtime.kernels.cpu.sampling import (
    cap_logits,
    reference_cap_logits,
    reference_rotations,
    rotations,
)

from ..rigs.attention_cases import make_case
from ..rigs.expert_cases import make_mixture, packed
from ..rigs.packed_weights import packed as packed_weight
from ..rigs.thread_rig import (
    cpu_seconds,
    in_child,
    kernel_threads,
    new_threads,
    other_threads,
    starved,
)

needs_compiler = pytest.mark.usefixtures("cpu_ops")
needs_linux = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux' schedulers")


class Operators:
    """Every operator that uses the pool, over random inputs, and its result with one thread."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        bf16 = torch.bfloat16
        self.attention = make_case([(500, 1), (37, 1), (900, 1), (0, 40)], (9, 3, 64), dtype=bf16)
        self.x = torch.randn(8, 576, dtype=bf16)
        self.weight = packed_weight([torch.randn(3000, 576)], bf16)
        self.logits = torch.randn(8, 50000)
        mixture = make_mixture(Routing(4), routed=16, hidden=576, features=128, dtype=bf16)
        self.experts, self.expert_tensors = mixture.op, packed(mixture)
        with kernel_threads(1):
            self.expected = self.run()

    def run(self) -> list[torch.Tensor]:
        out, arena = self.attention.run(kernels.paged_attention)
        linear = kernels.packed_linear(self.x, self.weight, None, 3000)
        tokens = torch.ops.stepgraph.sample_greedy.default(self.logits)
        mixed = kernels.packed_experts(self.experts, self.x, self.expert_tensors)
        return [out, arena.view(torch.int16), linear, tokens, mixed]

    def check(self) -> None:
        for found, expected in zip(self.run(), self.expected, strict=True):
            assert torch.equal(found, expected)


@needs_compiler
@needs_linux
def test_a_thread_that_lost_its_core_is_not_waited_for() -> None:
    """Starved threads stop in the middle of units and continue whole calls later."""
    operators = Operators(0)

    def check() -> None:
        operators.check()
        assert len(other_threads()) == 3
        with starved(other_threads()):
            # To wait for a starved thread once a call would take a second or so each time.
            began = time.perf_counter()
            for _ in range(40):
                operators.check()
            assert time.perf_counter() - began < 60
        operators.check()

    with kernel_threads(4):
        in_child(check)


@needs_compiler
def test_callers_share_the_pool() -> None:
    """Calls from several threads at once, each with results of its own."""
    every = [Operators(seed) for seed in range(3)]
    errors: list[BaseException] = []

    def call(operators: Operators) -> None:
        try:
            for _ in range(6):
                operators.check()
        except BaseException as error:
            errors.append(error)

    with kernel_threads(3):
        every[0].check()
        callers = [threading.Thread(target=call, args=(operators,)) for operators in every]
        with new_threads() as started:
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
        # A joined thread may be in the list of the system for a moment yet.
        assert started <= {caller.native_id for caller in callers}
    assert not errors


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    operators = Operators(1)
    with kernel_threads(3):
        operators.check()
        in_child(operators.check)
        operators.check()


@needs_compiler
def test_of_threads_that_destroy_a_handle_one_succeeds() -> None:
    memory = torch.zeros(2048, dtype=torch.uint8)
    region, abort = memory[-memory.data_ptr() % 128 :][:1024], torch.zeros(1, dtype=torch.int32)

    def destroy(handle: int) -> bool:
        try:
            torch.ops.stepgraph.communicator_destroy.default(handle)
        except RuntimeError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            handle = torch.ops.stepgraph.communicator_create.default(region, abort, 0, 2, 1.0)
            assert sum(pool.map(destroy, [handle] * 4)) == 1


@needs_compiler
@needs_linux
def test_idle_threads_sleep() -> None:
    operators = Operators(2)

    def check() -> None:
        operators.check()
        pool = other_threads()
        assert len(pool) == 2
        time.sleep(0.1)
        used = cpu_seconds(pool)
        time.sleep(0.3)
        assert cpu_seconds(pool) - used < 0.1

    with kernel_threads(3):
        in_child(check)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (600, 501)])
def test_rotations_and_capped_logits(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    angles = torch.randint(0, 100_000, shape[:1]), 10_000.0 ** -torch.rand(3, 31)
    logits = (torch.randn(shape) * 50).to(dtype)
    logits[0, 0] = torch.nan
    expected = reference_cap_logits(logits, 30.0)
    with kernel_threads(3):
        for pair in zip(rotations(*angles), reference_rotations(*angles), strict=True):
            torch.testing.assert_close(*pair, rtol=0, atol=2e-7)
        found = cap_logits(logits.clone(), 30.0)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.125}[dtype]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, equal_nan=True)
    if dtype == torch.bfloat16:  # no more than a rounding apart, and seldom
        assert (found != expected)[~expected.isnan()].sum() < 0.01 * found.numel() + 1


def test_usable_cores_respects_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(rooms, "_cgroup_quota", lambda: None)
    topology = {0: ("0", "0"), 1: ("0", "0"), 2: ("0", "1"), 3: ("1", "1")}

    def read(self: Path) -> str:
        cpu, name = int(self.parts[-3].removeprefix("cpu")), self.name
        return topology[cpu][name == "core_id"] + "\n"

    monkeypatch.setattr(Path, "read_text", read)
    for mask, cores in (({0, 1}, 1), ({0, 2}, 2), ({0, 1, 2, 3}, 3), ({3}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, mask=mask: mask, raising=False)
        assert rooms.usable_cores() == cores


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"app/cpu.max": "max 100000", "cpu.max": "300000 100000"}, 3.0),
        ({"app/cpu.max": "50000 100000", "cpu.max": "300000 100000"}, 0.5),
        ({"cpu/app/cpu.cfs_quota_us": "-1", "cpu/app/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/app/cpu.cfs_quota_us": "200000", "cpu/app/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_cgroup_quota(
    files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    groups = tmp_path / "groups"
    version_1 = any(name.startswith("cpu/") for name in files)
    groups.write_text("3:cpu,cpuacct:/app\n" if version_1 else "0::/app\n")
    monkeypatch.setattr(rooms, "_CGROUP", tmp_path)
    monkeypatch.setattr(rooms, "_GROUPS", groups)
    assert rooms._cgroup_quota() == quota


def test_threads_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "usable_cores", lambda: 4)
    given = {None: 4, 1: 1, 9: 9, -1: 3, -3: 1, -4: 1, -1000: 1}
    assert {value: rooms.resolve_threads(value) for value in given} == given
    for wrong in (0, True, 2.0, "2", 1025, -1025):
        with pytest.raises(ConfigError):
            EngineConfig(threads=wrong)  # type: ignore[arg-type]


def test_omp_num_threads_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_affine_cores", lambda: 8)
    monkeypatch.setattr(rooms, "_cgroup_quota", lambda: 5.9)
    for value, cores in (("3", 3), ("16", 5), ("2,4", 2), ("", 5), ("many", 5), ("0", 5)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert rooms.usable_cores() == cores
