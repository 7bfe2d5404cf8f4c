"""The compiled model is the same model: one graph, no break, one compilation however many dropout seeds."""

import shutil

import pytest
import torch

from torch_reference import DropoutSeed, Transformer
from torch_reference.training import TrainingOptions, initial_state

pytestmark = pytest.mark.skipif(
    hasattr(Transformer.forward, "__wrapped__"), reason="run-time checks of shapes cannot be traced"
)


def results(forward, module, inputs, seed):
    module.zero_grad()
    output = forward(*inputs, DropoutSeed(seed))
    output.square().mean().backward()
    return {"output": output.detach(), **{name: p.grad.clone() for name, p in module.named_parameters()}}


def assert_compiled_equals_eager(module, forward, inputs, *, backend):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    for seed in (1, 2, 3):
        eager, got = results(forward, module, inputs, seed), results(compiled, module, inputs, seed)
        for name, expected in eager.items():
            torch.testing.assert_close(got[name], expected, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "learned"},
        {"attention": "blockwise", "gradient_checkpointing": True, "window": 2},
    ],
)
def test_traced_model_equals_eager(build, ids, changes):
    model = build(num_encoder_layers=1, num_decoder_layers=1, dropout=0.2, attention_dropout=0.3, **changes)

    def forward(src, tgt, dropout):
        return model(src, tgt, dropout=dropout)

    assert_compiled_equals_eager(model, forward, ids, backend="aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_layer_equals_eager(build):
    """Down to machine code, for one part of the model: a whole one takes minutes to compile on a busy core."""
    network = build(activation_dropout=0.3).encoder.layers[0].feed_forward
    x = torch.randn(2, 7, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def forward(x, dropout):
        return network(x, dropout=dropout)

    assert_compiled_equals_eager(network, forward, (x,), backend="inductor")


def test_options_compile_the_model_that_is_trained(build):
    model = build()
    state = initial_state(model, TrainingOptions(compile=True))
    assert isinstance(state.model, torch._dynamo.OptimizedModule)
    assert {id(p) for p in state.model.parameters()} == {id(p) for p in model.parameters()}
    assert state.model.config is model.config
