"""Outputs of layers from the Triton kernels are those of the plain layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels import kernels_for
from stepgraph.runtime.kernels.triton.backend import gpu_kernels
from stepgraph.runtime.kernels.weights import MODEL
from stepgraph.runtime.models.decoder import Decoder

from ..rigs.stack_rig import CPU, Rig
from ..rigs.tiny_models import Tiny, load_weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels")


@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        ("gemma2", "prefill"),  # whose layers leave something to add
        *(pytest.param(v, "decode", marks=pytest.mark.slow) for v in ("base", "qwen3", "gemma2")),
    ],
)
def test_aux_layers(tiny: Tiny, variant: str, rows: str) -> None:
    rig = Rig.of(tiny(variant), torch.float32)
    plain = rig.decoder
    plain.stack = None
    kernels = kernels_for(gpu_kernels(MODEL), plain.plan)
    decoder = Decoder(rig.config, kernels, torch.float32, CPU, rig.groups)
    load_weights(decoder, tiny(variant).directory)
    assert decoder.stack is not None
    chunks = [(0, 9, 1), (2, 30, 1)] if rows == "decode" else [(0, 0, 3), (1, 7, 2)]
    inputs = rig.inputs(chunks)
    if rows == "decode":
        inputs = dataclasses.replace(inputs, tokens_per_row=1, query_start_loc=None)
    x_TD = rig.hidden(inputs)
    aux_layers = (0, 1, len(plain.layers) - 1, len(plain.layers))
    outputs = []
    for each in (decoder, plain):
        with torch.no_grad():
            outputs.append(each.decode_with_aux_layers(x_TD, rig.arena.clone(), inputs, aux_layers))
    (hidden, ours), (expected, theirs) = outputs
    assert (hidden - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
