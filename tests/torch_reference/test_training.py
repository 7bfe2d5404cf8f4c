import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from torch_reference import DropoutSeed, Transformer, TransformerConfig
from torch_reference.decoding import greedy
from torch_reference.training import (
    Batch,
    CosineDecay,
    TrainingOptions,
    accumulate_gradients,
    clip_by_global_norm,
    evaluate,
    initial_state,
    label_smoothed_cross_entropy,
    learning_rate,
    make_schedule,
    noam_lr,
    train,
    train_step,
)


def copy_batches(number: int, *, seed: int, size: int = 16) -> list[Batch]:
    """Sentences of two to five pieces out of nine, to be repeated."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(number):
        src = torch.randint(4, 13, (size, 6), generator=generator)
        lengths = torch.randint(2, 6, (size, 1), generator=generator)
        src = torch.where(torch.arange(6) < lengths, src, torch.where(torch.arange(6) == lengths, 2, 0))
        tgt_in = F.pad(src.masked_fill(src == 2, 0), (1, 0), value=1)[:, :-1]
        batches.append(Batch(src, tgt_in, src))
    return batches


def copy_model(**changes: object) -> Transformer:
    fields = {
        "src_vocab_size": 13,
        "tgt_vocab_size": 13,
        "d_model": 32,
        "d_ff": 64,
        "num_heads": 4,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "max_len": 16,
        "dropout": 0.05,
        **changes,
    }
    return Transformer(TransformerConfig(**fields), generator=torch.Generator().manual_seed(0))


def parameters(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_equals_torchs(smoothing):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 7, (3, 5), generator=generator)
    targets[1, 2:] = 0
    loss, num_tokens = label_smoothed_cross_entropy(logits, targets, smoothing=smoothing, pad_id=0)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, ignore_index=0)
    torch.testing.assert_close(loss / num_tokens, expected, rtol=1e-14, atol=0)
    assert num_tokens == (targets != 0).sum()


def test_loss_in_closed_form_at_three_classes():
    """P11: the target has 1 - s + s/3, the two others s/3 each."""
    logits = torch.tensor([[[math.log(0.2), math.log(0.5), math.log(0.3)]] * 2], dtype=torch.float64)
    loss, num_tokens = label_smoothed_cross_entropy(logits, torch.tensor([[1, 0]]), smoothing=0.3, pad_id=0)
    expected = -(0.8 * math.log(0.5) + 0.1 * math.log(0.2) + 0.1 * math.log(0.3))
    assert float(loss) == pytest.approx(expected, rel=1e-14)
    assert int(num_tokens) == 1


def test_loss_of_half_width_logits_is_float32_and_blind_to_padding():
    logits = torch.full((1, 2, 7), 3.0, dtype=torch.bfloat16)
    logits[0, 1] = torch.nan
    loss, _ = label_smoothed_cross_entropy(logits, torch.tensor([[4, 0]]), smoothing=0.1, pad_id=0)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(math.log(7), rel=1e-6)


def test_noam_table():
    """P9."""
    expected = {step: 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5) for step in (1, 2, 3999, 4000, 4001, 10**5)}
    got = {step: noam_lr(step, d_model=512, warmup_steps=4000, factor=2.0) for step in expected}
    assert got == pytest.approx(expected, rel=1e-14)
    assert noam_lr(4000, d_model=512, warmup_steps=4000) == pytest.approx(6.988e-4, rel=1e-3)
    with pytest.raises(ValueError, match="counted from 1, got 0"):
        noam_lr(0, d_model=512, warmup_steps=4000)


@pytest.mark.parametrize("final_share", [0.0, 0.25])
def test_cosine_table(final_share):
    """Up in a line, down in half a cosine, and then level."""
    decay = CosineDecay(peak=0.5, decay_steps=14, final_share=final_share)
    options = TrainingOptions(warmup_steps=4, cosine=decay)
    got = [learning_rate(step, options, d_model=512) for step in (1, 3, 4, 9, 14, 15, 1000)]
    end = 0.5 * final_share
    assert got == pytest.approx([0.125, 0.375, 0.5, (0.5 + end) / 2, end, end, end], rel=1e-14, abs=1e-17)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peak": 0.0, "decay_steps": 9}, "peak: expected more than 0, got 0.0"),
        ({"peak": 0.1, "decay_steps": 0}, "decay_steps: expected more than 0, got 0"),
        ({"peak": 0.1, "decay_steps": 9, "final_share": 1.5}, r"final_share: expected a share in \[0, 1\], got 1.5"),
        ({"peak": 0.1, "decay_steps": 4}, r"cosine\.decay_steps: expected more than warmup_steps=4, got 4"),
    ],
)
def test_a_cosine_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainingOptions(warmup_steps=4, cosine=CosineDecay(**fields))


def test_the_optimizer_takes_the_table_from_its_first_step_on():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    options = TrainingOptions(warmup_steps=3, noam_factor=0.5)
    schedule = make_schedule(optimizer, options, d_model=30)
    for step in range(1, 7):
        before = float(weight.detach())
        weight.grad = torch.ones(1)
        optimizer.step()
        assert before - float(weight.detach()) == pytest.approx(
            noam_lr(step, d_model=30, warmup_steps=3, factor=0.5), rel=1e-5
        )
        schedule.step()


@pytest.mark.parametrize(("max_norm", "scale"), [(2.5, 0.5), (5.0, 1.0), (7.0, 1.0), (None, 1.0)])
def test_clipping_has_no_epsilon(max_norm, scale):
    """P8."""
    weights = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
    weights[0].grad, weights[1].grad = torch.full((1,), 3.0).double(), torch.full((1,), 4.0).double()
    assert float(clip_by_global_norm(weights, max_norm)) == 5.0
    assert [float(weight.grad) for weight in weights[:2]] == [3.0 * scale, 4.0 * scale]


def test_clipping_leaves_a_zero_gradient_alone():
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    assert float(clip_by_global_norm([weight], 1.0)) == 0.0
    assert float(weight.grad) == 0.0


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    """T2: micro-batches with different numbers of tokens."""
    model = copy_model(dtype="float64", param_dtype="float64", dropout=0.0)
    (whole,) = copy_batches(1, seed=0)
    parts = [Batch(*(x[rows] for x in whole)) for rows in (slice(0, 1), slice(1, 4), slice(4, 9), slice(9, 16))]
    options = TrainingOptions()
    state = initial_state(model, options)
    found = []
    for micro_batches in ([whole], parts):
        model.zero_grad()
        sums = accumulate_gradients(state, micro_batches, options)
        found.append((sums, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}))
    (sums, gradients), (split_sums, split_gradients) = found
    assert split_sums.num_tokens == sums.num_tokens == (whole.tgt_out != 0).sum()
    torch.testing.assert_close(split_sums.loss, sums.loss, rtol=1e-13, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(split_gradients[name], gradient, rtol=0, atol=1e-14)


def test_a_ragged_last_window_makes_a_step():
    """T2: five batches in windows of two are three steps, and nothing is carried into the next epoch."""
    batches = copy_batches(5, seed=0)
    history = train(copy_model(), batches, TrainingOptions(accumulation_steps=2), num_epochs=2)
    tokens = [int((batch.tgt_out != 0).sum()) for batch in batches]
    expected = [tokens[0] + tokens[1], tokens[2] + tokens[3], tokens[4]]
    assert [step.num_tokens for step in history.steps] == 2 * expected
    assert [step.learning_rate for step in history.steps] == pytest.approx(
        [noam_lr(step, d_model=32, warmup_steps=4000) for step in range(1, 7)]
    )


def test_one_step_is_adam_by_the_book():
    """Kingma & Ba 2015 with the clipped gradient, written out; no weight decay (P10)."""
    model = copy_model(dtype="float64", param_dtype="float64", dropout=0.1)
    options = TrainingOptions(warmup_steps=10, clip_norm=0.5, seed=4)
    batches, reference = copy_batches(3, seed=0), copy_model(dtype="float64", param_dtype="float64", dropout=0.1)
    state = initial_state(model, options)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in reference.named_parameters()}
    for number, batch in enumerate(batches):
        train_step(state, [batch], options)
        reference.zero_grad()
        logits = reference(batch.src, batch.tgt_in, dropout=DropoutSeed(4 * 2**32 + number))
        F.cross_entropy(logits.mT, batch.tgt_out, label_smoothing=0.1, ignore_index=0).backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters()))
        rate = noam_lr(number + 1, d_model=32, warmup_steps=10)
        with torch.no_grad():
            for name, p in reference.named_parameters():
                gradient = p.grad * min(1.0, 0.5 / norm)
                first = 0.9 * moments[name][0] + 0.1 * gradient
                second = 0.98 * moments[name][1] + 0.02 * gradient**2
                moments[name] = first, second
                unbiased = first / (1 - 0.9 ** (number + 1)), second / (1 - 0.98 ** (number + 1))
                p.sub_(rate * unbiased[0] / (unbiased[1].sqrt() + 1e-9))
    for name, expected in parameters(reference).items():
        if "k_proj.bias" in name:  # its true gradient is zero: Adam makes steps of pure rounding
            continue
        torch.testing.assert_close(parameters(model)[name], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_learns_to_copy(dtype):
    model = copy_model(dtype=dtype)
    held_out = copy_batches(2, seed=99)
    before = evaluate(model, held_out)
    history = train(model, copy_batches(40, seed=0), TrainingOptions(warmup_steps=100), num_epochs=5, held_out=held_out)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(history.evaluations) == 5
    assert before.nll > 2.0
    assert history.evaluations[-1].nll < 0.45
    assert history.evaluations[-1].perplexity == math.exp(history.evaluations[-1].nll)
    taken = [step for step in history.steps if not step.skipped]
    assert len(taken) >= 190 or dtype == "float16"
    assert [step.learning_rate for step in taken] == pytest.approx(
        [noam_lr(step + 1, d_model=32, warmup_steps=100) for step in range(len(taken))]
    )
    output = greedy(model, held_out[0].src, max_len=6)
    assert (output == held_out[0].src).double().mean() > 0.8


def test_training_repeats_itself_and_depends_on_its_seed():
    def run(seed):
        model = copy_model(dropout=0.3)
        train(model, copy_batches(3, seed=0), TrainingOptions(seed=seed, warmup_steps=5))
        return parameters(model)

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["src_embedding.weight"], other["src_embedding.weight"])


def test_evaluation_counts_every_token_once_and_nothing_else():
    """T5: whatever the batches and their padding."""
    model = copy_model(dtype="float64", param_dtype="float64", dropout=0.5)
    (whole,) = copy_batches(1, seed=0)
    rows = [Batch(*(F.pad(x[i : i + 1], (0, 3)) for x in whole)) for i in range(16)]
    padding_only = Batch(*(torch.zeros_like(x) for x in whole))
    expected, got = evaluate(model, [whole]), evaluate(model, [*rows, padding_only])
    assert got.num_tokens == expected.num_tokens == int((whole.tgt_out != 0).sum())
    assert got.nll == pytest.approx(expected.nll, rel=1e-13)
    with pytest.raises(ValueError, match="at least one token"):
        evaluate(model, [padding_only])


def test_a_step_whose_float16_gradients_overflow_is_skipped():
    model = copy_model(dtype="float16")
    options = TrainingOptions(warmup_steps=10)
    state = initial_state(model, options)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before, (batch,) = parameters(model), copy_batches(1, seed=0)
    metrics = train_step(state, [batch], options)
    assert metrics.skipped
    assert state.step == 0
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())
    while train_step(state, [batch], options).skipped:
        pass
    assert state.step == 1
    assert state.optimizer.state_dict()["state"][0]["step"] == 1
    assert not torch.equal(parameters(model)["src_embedding.weight"], before["src_embedding.weight"])


def test_float16_gradients_are_clipped_at_their_true_size():
    """Not at the size that the scaler gave them."""
    (batch,) = copy_batches(1, seed=0)
    options = TrainingOptions(clip_norm=0.5)
    found = {}
    for dtype in ("float32", "float16"):
        model = copy_model(dtype=dtype, dropout=0.0)
        metrics = train_step(initial_state(model, options), [batch], options)
        found[dtype] = metrics.grad_norm
        clipped = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        assert clipped == pytest.approx(0.5, rel=1e-4)
    assert found["float16"] == pytest.approx(found["float32"], rel=0.02)
    assert found["float32"] > 0.5


def test_a_loss_that_is_not_finite_stops_the_run_with_good_parameters():
    """T13."""
    model, (batch,) = copy_model(), copy_batches(1, seed=0)
    state = initial_state(model, TrainingOptions())
    with torch.no_grad():
        model.decoder.layers[0].feed_forward.linear1.bias[0] = torch.inf
    before = parameters(model)
    with pytest.raises(FloatingPointError, match="in step 1, got loss nan"):
        train_step(state, [batch], TrainingOptions())
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())


def test_callers_mistakes():
    with pytest.raises(ValueError, match="expected at least one batch in epoch 2, got none"):
        train(copy_model(), iter(copy_batches(1, seed=0)), TrainingOptions(), num_epochs=2)
    with pytest.raises(ValueError, match="param_dtype"):
        initial_state(copy_model(dtype="float16", param_dtype="float16"), TrainingOptions())
    for field, value in [("label_smoothing", 1.0), ("accumulation_steps", 0), ("clip_norm", 0.0), ("seed", -1)]:
        with pytest.raises(ValueError, match=f"{field}: expected"):
            TrainingOptions(**{field: value})
