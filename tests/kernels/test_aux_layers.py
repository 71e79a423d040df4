"""Features for drafters: the outputs of layers are those of transformers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from stepgraph.runtime.kernels import have_compiler, kernels_for
from stepgraph.runtime.kernels.weights import MODEL
from stepgraph.runtime.models.decoder import Decoder

from ..rigs.stack_rig import CPU, Rig
from ..rigs.tiny_models import Tiny, TinyModel, load_weights

AUX_LAYERS = {
    "base": (0, 2),
    "qwen3": (1, 3, 4),
    "gemma2": (0, 1, 3),
    "gemma3": (1, 6),
    "odd": (1,),
}


def hidden_states(model: TinyModel, tokens: list[int], aux_layers: tuple[int, ...]) -> torch.Tensor:
    """Outputs of layers, `[tokens, len(aux_layers) * D]`; the number of layers stands for the final
    one, normed."""
    layers: dict[int, torch.Tensor] = {}
    base = model.reference.model
    count = len(base.layers)
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, index=index: layers.update(
                {index: (out[0] if isinstance(out, tuple) else out).view(len(tokens), -1)}
            )
        )
        for index, layer in enumerate(base.layers)
    ]
    with torch.no_grad():
        layers[count] = base(torch.tensor([tokens])).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return torch.cat([layers[layer] for layer in aux_layers], dim=-1)


WAYS = [
    *((way, variant) for way in ("stack", "layers") for variant in AUX_LAYERS),
    ("triton", "gemma2"),  # whose layers leave something to add
    *(pytest.param("triton", v, marks=pytest.mark.slow) for v in ("base", "qwen3")),
]


def decoder_of(model: TinyModel, rig: Rig, way: str) -> Decoder:
    """The layers as a stack in C++ or Triton, or one by one."""
    decoder = rig.decoder
    if way == "triton":
        pytest.importorskip("triton")
        from stepgraph.runtime.kernels.triton.backend import gpu_kernels

        kernels = kernels_for(gpu_kernels(MODEL), decoder.plan)
        decoder = Decoder(rig.config, kernels, torch.float32, CPU, rig.groups)
        load_weights(decoder, model.directory)
    assert decoder.stack is not None
    if way == "layers":
        decoder.stack = None
    return decoder


@pytest.mark.parametrize(("way", "variant"), WAYS)
def test_aux_layers_are_the_outputs_of_layers(tiny: Tiny, variant: str, way: str) -> None:
    if way == "stack" and not have_compiler():
        pytest.skip("needs a C++ compiler")
    if way == "triton" and torch.cuda.is_available():
        pytest.skip("interprets kernels")
    model = tiny(variant)
    rig = Rig.of(model, torch.float32)
    decoder = decoder_of(model, rig, way)
    rows = model.prompts(140, 25, 18)
    chunks = [
        [(0, 0, 123), (1, 0, 25)],
        [(0, 123, 17), (2, 0, 1)],
        *([(2, at, 1)] for at in (1, 2)),
        [(2, 3, 15)],
    ]
    if way == "triton":  # the interpreter takes its time
        chunks = [[(2, 0, 3)], [(2, 3, 1)]]
    layers = len(decoder.layers)
    aux_layers = (*AUX_LAYERS[variant], layers)
    expected = [hidden_states(model, tokens, aux_layers) for tokens in rows]
    for step in chunks:
        inputs = rig.inputs(step)
        if [count for *_, count in step] == [1]:
            inputs = dataclasses.replace(inputs, tokens_per_row=1, query_start_loc=None)
        ids = torch.tensor([token for row, at, n in step for token in rows[row][at : at + n]])
        plain_arena = rig.arena.clone()
        with torch.no_grad():
            hidden, features = decoder.decode_with_aux_layers(
                decoder.embed(ids), rig.arena, inputs, aux_layers
            )
            plain = decoder.decode(decoder.embed(ids), plain_arena, inputs)
            _, final = decoder.decode_with_aux_layers(
                decoder.embed(ids), rig.arena, inputs, (layers,)
            )
        assert torch.equal(hidden, plain)
        assert torch.equal(final, hidden)
        assert torch.equal(rig.arena, plain_arena)
        assert torch.equal(features[:, -hidden.shape[1] :], hidden)
        theirs = torch.cat([expected[row][at : at + n] for row, at, n in step])
        assert (features - theirs).abs().max() < 2e-4 * theirs.abs().max()


def test_stack_refuses_impossible_aux_layers(base: TinyModel) -> None:
    rig = Rig.of(base, torch.float32)
    inputs = rig.inputs([(0, 0, 2)])
    for aux_layers in ((3,), (-1,), (1, 0), (1, 1)):
        with pytest.raises(RuntimeError), torch.no_grad():
            rig.decoder.run_layers(rig.hidden(inputs), rig.arena, inputs, aux_layers)
    x_TD = rig.hidden(inputs)
    with pytest.raises(RuntimeError), torch.no_grad():
        rig.decoder.run_layers(x_TD, rig.arena, inputs, (0,), x_TD)
