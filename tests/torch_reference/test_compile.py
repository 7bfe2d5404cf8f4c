"""The compiled model is the same model: one graph, no break, one compilation however many dropout seeds.

Down to machine code, by inductor, in one run of training; the other tests stop at the traced graph, which takes less.
"""

import shutil

import pytest
import torch

from torch_reference import DropoutSeed, Transformer
from torch_reference.training import Batch, TrainingOptions, initial_state, train

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


@pytest.fixture
def batches(ids):
    """Five batches with padding, all of one shape: one compilation is enough."""
    src, tgt = ids
    tgt_out = torch.cat([tgt[:, 1:], torch.full((4, 1), 2)], dim=1)
    tgt_out[1, 2:] = torch.tensor([2, 0, 0])  # as short as its tgt_in
    return [Batch(src.roll(i, dims=0), tgt, tgt_out) for i in range(5)]


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_training_equals_eager(build, batches):
    """Three steps, the last one of a single micro-batch; losses, gradient norms and parameters."""

    def trained(*, compile):
        model = build(num_encoder_layers=1, num_decoder_layers=1, dropout=0.2, attention_dropout=0.3)
        # A gradient that is zero but for rounding has to stay small beside ε, or Adam makes a step of the rounding.
        options = TrainingOptions(compile=compile, accumulation_steps=2, warmup_steps=10, eps=1e-5, seed=3)
        history = train(model, batches, options)
        return torch.tensor(history.steps, dtype=torch.float64), dict(model.named_parameters())

    initial = dict(build(num_encoder_layers=1, num_decoder_layers=1).named_parameters())
    expected_steps, expected = trained(compile=False)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    steps, got = trained(compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["inductor"], "the model did not reach inductor"
    torch.compiler.reset()

    assert steps.shape == (3, 5)
    torch.testing.assert_close(steps, expected_steps, rtol=0, atol=1e-12)
    assert got.keys() == expected.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(got[name], parameter, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
        moved = (parameter - initial[name]).abs().max()
        assert moved > 1e-3 or name.endswith("k_proj.bias"), f"{name}: training moved it by {moved} only"


def test_options_compile_the_model_that_is_trained(build):
    model = build()
    state = initial_state(model, TrainingOptions(compile=True))
    assert isinstance(state.model, torch._dynamo.OptimizedModule)
    assert {id(p) for p in state.model.parameters()} == {id(p) for p in model.parameters()}
    assert state.model.config is model.config
