"""Paged attention as kernels, write and all: decode and prefill against float64, over poison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from stepgraph.runtime.kernels import paged_attention, reference_paged_attention
from stepgraph.runtime.kernels.triton.paged_attention import (
    paged_attention_on_gpu,
    triton_paged_attention,
)

from ..rigs.attention_cases import check, make_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DECODE = [(0, 1), (16, 1), (70, 1)]
VERIFY = [(0, 3), (15, 3), (70, 3)]
PREFILL = [(0, 19), (37, 6)]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 13},
    "softcap": {"softcap": 2.0},
    "int8": {"storage": "int8"},
    "fp8": {"storage": "fp8"},
    "latent": {"latent": True, "value_dim": 32},
    "sinks": {"sinks": True, "storage": "fp8"},
    "sinks in windows": {"sinks": True, "window": 13, "softcap": 2.0},
    "chunks": {"chunk": 24},
    "chunks and sinks": {"chunk": 32, "sinks": True, "window": 20},
    "all": {"latent": True, "value_dim": 20, "window": 40, "softcap": 3.0, "storage": "fp8"},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chunks", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_in_every_dtype(
    chunks: list[tuple[int, int]], dtype: torch.dtype, form: dict[str, Any]
) -> None:
    heads = (6, 1, 34) if "latent" in form else (6, 2, 34)
    case = make_case(chunks, heads, 16, dtype, 3 if chunks is VERIFY else 2, **form)
    check(case.to(DEVICE), triton_paged_attention, TOLERANCE[dtype])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunks", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("heads", "block_size"), [((5, 1, 80), 5), ((2, 2, 10), 1), ((7, 1, 7), 64), ((3, 1, 128), 16)]
)
def test_odd_shapes(
    chunks: list[tuple[int, int]], heads: tuple[int, int, int], block_size: int
) -> None:
    case = make_case(chunks, heads, block_size, padding=1)
    check(case.to(DEVICE), triton_paged_attention, 1e-5)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=4),
    padding=st.integers(0, 5),
    limits=st.sampled_from([(0, 0), (1, 0), (9, 0), (50, 0), (0, 7), (0, 32), (20, 16)]),
    sinks=st.booleans(),
    block_size=st.integers(1, 20),
)
def test_any_chunks_are_what_the_reference_makes_of_them(
    chunks: list[tuple[int, int]],
    padding: int,
    limits: tuple[int, int],
    sinks: bool,
    block_size: int,
) -> None:
    window, chunk = limits
    form: dict[str, Any] = {"window": window, "chunk": chunk, "sinks": sinks}
    case = make_case(chunks, (4, 2, 16), block_size, padding=padding, **form).to(DEVICE)
    check(case, triton_paged_attention, 1e-5)
    expected, _ = case.run(reference_paged_attention)
    out, _ = case.run(triton_paged_attention)
    n = case.valid_tokens
    torch.testing.assert_close(out[:n], expected[:n], atol=1e-5, rtol=1e-5)


def test_both_operations_are_registered_for_cuda() -> None:
    """Engines with different kernels share a process, so neither may replace the other."""
    for attention in (paged_attention, paged_attention_on_gpu):
        case = make_case(PREFILL)
        out, _ = case.to("meta").run(attention)
        assert out.shape == case.q.shape
    for name in ("stepgraph::paged_attention", "stepgraph::triton_paged_attention"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    if DEVICE == "cuda":
        case = make_case(PREFILL).to(DEVICE)
        out = case.run(paged_attention_on_gpu)[0]
        assert torch.equal(out, case.run(triton_paged_attention)[0])
