"""Features for drafters: the outputs of layers are those of transformers."""

from __future__ import annotations

import pytest
import torch
from stepgraph.runtime import kernels

from ..rigs.stack_rig import Rig
from ..rigs.tiny_models import Tiny, TinyModel

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


@pytest.mark.parametrize("stacked", [True, False], ids=["stack", "layers"])
@pytest.mark.parametrize("variant", AUX_LAYERS)
def test_aux_layers_are_the_outputs_of_layers(tiny: Tiny, variant: str, stacked: bool) -> None:
    if stacked and not kernels.have_compiler():
        pytest.skip("needs a C++ compiler")
    model = tiny(variant)
    rig = Rig.of(model, torch.float32)
    assert rig.decoder.stack is not None
    if not stacked:
        rig.decoder.stack = None
    rows = model.prompts(140, 25, 18)
    chunks = [
        [(0, 0, 123), (1, 0, 25)],
        [(0, 123, 17), (2, 0, 1)],
        *([(2, at, 1)] for at in (1, 2)),
        [(2, 3, 15)],
    ]
    decoder, layers = rig.decoder, len(rig.decoder.layers)
    aux_layers = (*AUX_LAYERS[variant], layers)
    expected = [hidden_states(model, tokens, aux_layers) for tokens in rows]
    for step in chunks:
        inputs = rig.inputs(step)
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
