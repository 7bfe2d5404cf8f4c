"""Optimizers on the same gradients: equal where they are, and every known difference of Adam is seen."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from parity.rungs import NotComparedError, optimizer
from tests.parity.rungs import small_pair

RATE, B1, B2, EPS, DECAY = 1e-3, 0.9, 0.98, 1e-8, 1e-2


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE, betas=(B1, B2), eps=EPS)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=(B1, B2), eps=EPS, weight_decay=DECAY)


def l2(parameters: Any) -> torch.optim.Optimizer:
    """torch's Adam puts its weight decay into the gradient (P10)."""
    return torch.optim.Adam(parameters, lr=RATE, betas=(B1, B2), eps=EPS, weight_decay=DECAY)


def matrices_decay(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(B1, B2), eps=EPS)


def port_adam(**changes: Any) -> optax.GradientTransformation:
    return optax.adam(**{"learning_rate": RATE, "b1": B1, "b2": B2, "eps": EPS, **changes})


def port_adamw(**changes: Any) -> optax.GradientTransformation:
    return optax.adamw(**{"learning_rate": RATE, "b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY, **changes})


def without_correction() -> optax.GradientTransformation:
    def init(params: Any) -> Any:
        return {name: (jnp.zeros_like(p), jnp.zeros_like(p)) for name, p in params.items()}

    def update(gradients: Any, state: Any, params: Any) -> Any:
        state = {n: (B1 * state[n][0] + (1 - B1) * g, B2 * state[n][1] + (1 - B2) * g**2) for n, g in gradients.items()}
        return {n: -RATE * m / (jnp.sqrt(v) + EPS) for n, (m, v) in state.items()}, state

    return optax.GradientTransformation(init, update)


def climb(theirs: Callable[..., Any] | None, ours: Any) -> Any:
    return optimizer.climb(small_pair.runs(reference={"optimizer": theirs}, port={"optimizer": ours}))


@pytest.mark.parametrize(
    ("theirs", "ours", "moments"),
    [
        (adam, port_adam(), {"exp_avg", "exp_avg_sq"}),
        (adamw, port_adamw(), {"exp_avg", "exp_avg_sq"}),
        (l2, optax.chain(optax.add_decayed_weights(DECAY), port_adam()), {"exp_avg", "exp_avg_sq"}),
        (
            matrices_decay,
            port_adamw(mask=lambda params: {n: p.ndim > 1 for n, p in params.items()}),
            {"exp_avg", "exp_avg_sq"},
        ),
        (lambda p: torch.optim.SGD(p, lr=RATE, momentum=B1), optax.sgd(RATE, momentum=B1), {"momentum_buffer"}),
        (
            lambda p: torch.optim.RMSprop(p, lr=RATE, alpha=B2, eps=EPS),
            optax.rmsprop(RATE, decay=B2, eps=EPS, eps_in_sqrt=False),
            {"square_avg"},
        ),
    ],
    ids=["Adam", "AdamW", "L2", "groups", "SGD", "RMSprop"],
)
def test_equal_optimizers_pass(theirs: Any, ours: Any, moments: set[str]) -> None:
    outcome = climb(theirs, ours)
    assert all(section.passed for section in outcome.sections), [s.failures[:2] for s in outcome.sections]
    assert len(outcome.sections[0].comparisons) == 6 * optimizer.NUM_STEPS
    assert {c.tensor.split(" of ")[0] for c in outcome.sections[1].comparisons} == moments


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (adam, port_adam(eps=1e-7)),
        (adam, port_adam(eps=0.0, eps_root=EPS)),
        (adam, port_adam(eps=0.0, eps_root=EPS**2)),
        (adam, port_adam(b2=0.981)),
        (adam, port_adam(b1=0.89)),
        (adam, port_adam(learning_rate=RATE * (1 + 1e-9))),
        (adam, without_correction()),
        (adam, port_adam(nesterov=True)),
        (adam, optax.adamw(RATE, b1=B1, b2=B2, eps=EPS)),
        (l2, port_adamw()),
        (adamw, optax.chain(optax.add_decayed_weights(DECAY), port_adam())),
        (matrices_decay, port_adamw()),
        (adam, optax.chain(optax.clip_by_global_norm(1.0), port_adam())),
        (adam, optax.scale(-RATE)),
    ],
    ids=[
        "eps",
        "eps inside the root",
        "its square inside the root",
        "b2",
        "b1",
        "rate",
        "no bias correction",
        "nesterov",
        "decay that torch has not",
        "L2 for decoupled",
        "decoupled for L2",
        "decay on biases",
        "clipping besides",
        "no Adam",
    ],
)
def test_other_optimizers_are_seen(theirs: Any, ours: Any) -> None:
    outcome = climb(theirs, ours)
    assert not outcome.sections[0].passed
    evidence = outcome.evidence
    assert len(evidence["gradients"]) == len(evidence["reference"]) == len(evidence["port"]) == optimizer.NUM_STEPS
    shapes = {array.shape for key in ("gradients", "reference", "port") for array in evidence[key]}
    assert shapes == {evidence["weights"].shape}
    assert not evidence["gradients"][optimizer.ZERO_STEP - 1].any()


def test_moments_alone_can_differ() -> None:
    """A second moment that is kept wrongly and corrected on use: every update is equal."""
    ours = port_adam()

    def update(gradients: Any, state: Any, params: Any) -> Any:
        first, rest = state
        first = first._replace(nu={n: v / 2 for n, v in first.nu.items()})
        updates, (new, rest) = ours.update(gradients, (first, rest), params)
        return updates, (new._replace(nu={n: v * 2 for n, v in new.nu.items()}), rest)

    outcome = climb(adam, optax.GradientTransformation(ours.init, update))
    assert outcome.sections[0].passed
    assert {c.tensor.split(" of ")[0] for c in outcome.sections[1].failures} == {"exp_avg_sq"}


def test_what_is_not_kept_is_said() -> None:
    outcome = climb(adam, optax.scale(-RATE))
    assert any("exp_avg_sq not compared" in note for note in outcome.notes)


def test_nothing_to_compare_and_wrong_types() -> None:
    with pytest.raises(NotComparedError, match="reference brings no optimizer"):
        climb(None, port_adam())
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        climb(lambda parameters: "Adam", port_adam())
    with pytest.raises(TypeError, match="GradientTransformation"):
        climb(adam, "adam")


def test_two_biases_for_one() -> None:
    """An LSTM's second bias is held still; the first moves as the port's one does."""
    from flax import nnx

    from parity.pair import Pair, Side
    from parity.runs import Runs

    class Reference(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    class Port(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.rnn = nnx.RNN(nnx.LSTMCell(3, 4, rngs=rngs))

        def __call__(self, x: Any) -> Any:
            return self.rnn(x)

    pair = Pair(
        reference=Side(build=Reference, optimizer=adam),
        port=Side(build=Port, optimizer=port_adam()),
        inputs={"x": np.random.default_rng(0).standard_normal((2, 5, 3))},
    )
    outcome = optimizer.climb(Runs(pair))
    assert outcome.sections[0].passed
    assert any("bias" in c.tensor for c in outcome.sections[0].comparisons)
    assert outcome.sections[1].passed
    assert any("exp_avg_sq of" in c.tensor and "bias" in c.tensor for c in outcome.sections[1].comparisons)
    assert not any("not compared" in note for note in outcome.notes)
