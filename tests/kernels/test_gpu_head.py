"""The head of a decode step against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton.head import head, reference_head
from stepgraph.runtime.kernels.triton.linear import GpuLinear, GpuNorm, LinearConfig, Pending

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEW = LinearConfig(16, 16)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "config", "chunk"),
    [(1, FEW, 16), (3, FEW, 16), (5, None, 1024), (33, None, 1024)],
)
@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (3.0, 1.0), (0.0, 0.11), (3.0, 0.2)])
def test_logits_and_the_best_of_each_chunk(
    dtype: torch.dtype,
    tokens: int,
    config: LinearConfig | None,
    chunk: int,
    softcap: float,
    scale: float,
) -> None:
    hidden, vocab = 37, 131 if chunk < 1024 else 1100
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype)
    weight = torch.randn(vocab, hidden, device=DEVICE, dtype=dtype)
    norm = GpuNorm(torch.randn(hidden, device=DEVICE, dtype=dtype), 1e-5)
    linear = GpuLinear(weight)
    logits, maxima, ids = head(x, norm, linear, softcap, None, config, scale=scale)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    expected, _, _ = reference_head(x, norm, linear, softcap, scale=scale)
    assert (logits - expected).float().norm() <= tolerance * expected.float().norm()
    for i, part in enumerate(logits.float().split(chunk, dim=1)):
        assert torch.equal(maxima[:, i], part.amax(-1))
        assert torch.equal(ids[:, i], (part.argmax(-1) + i * chunk).int())


def test_equal_logits_and_what_is_no_number() -> None:
    weight = torch.ones(40, 16, device=DEVICE)
    weight[33] = float("nan")
    norm = GpuNorm(torch.ones(16, device=DEVICE), 1e-5)
    x = torch.rand(2, 16, device=DEVICE)
    x[1] = float("nan")  # a row of its own
    logits, maxima, ids = head(x, norm, GpuLinear(weight), config=FEW)
    assert ids[0, :2].tolist() == [0, 16]
    assert bool(((ids >= 0) & (ids < 40)).all())
    assert bool(logits[0, :33].isfinite().all())
    assert bool(maxima[0, :2].isfinite().all())
    assert maxima[0, 2] == torch.inf
    assert maxima[1].eq(torch.inf).all()


def test_pending_rows_are_added_first() -> None:
    x, delta = torch.randn(2, 2, 24, device=DEVICE).unbind(0)
    norm, post = (GpuNorm(torch.randn(24, device=DEVICE), 1e-6, offset=True) for _ in range(2))
    linear = GpuLinear(torch.randn(50, 24, device=DEVICE))
    summed, expected_sum = torch.full_like(x, float("nan")), torch.empty_like(x)
    logits, _, _ = head(x, norm, linear, 0.0, Pending(delta, post, summed), FEW)
    expected, _, _ = reference_head(x, norm, linear, 0.0, Pending(delta, post, expected_sum))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(summed, expected_sum)
