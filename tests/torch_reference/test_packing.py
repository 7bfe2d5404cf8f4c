"""Several pairs in one row give what each gives in a row of its own."""

import pytest
import torch

from torch_reference import Packing

# Of every row, its pairs: how long their sources and targets are. 9 and 8 tokens a row, the rest is padding.
PAIRS = [[(3, 2), (4, 3)], [(5, 4)], [(2, 1), (1, 3), (3, 4)]]
SRC_LEN, TGT_LEN = 9, 8

VARIANTS = [
    {},
    {"norm_order": "pre", "window": 1},
    {"attention": "blockwise", "attention_block_size": 2},
    {"attention": "blockwise", "attention_block_size": 3, "window": 2, "norm_order": "pre"},
    {"positions": "learned", "position_offset": 2},
    {"positions": "learned", "norm_order": "pre", "attention": "blockwise", "attention_block_size": 4},
    {"attention": "library", "window": 2},
    {"gradient_checkpointing": True},
]


def random_pairs():
    """The ids of every pair."""
    generator = torch.Generator().manual_seed(2)

    def sentence(length, first=None):
        ids = torch.randint(4, 60, (length,), generator=generator)
        return ids if first is None else torch.cat([torch.tensor([first]), ids[1:]])

    return [[(sentence(source), sentence(target, first=1)) for source, target in row] for row in PAIRS]


def packed(pairs):
    """Source and target ids of packed rows, and their segments."""
    shapes = {0: (len(pairs), SRC_LEN), 1: (len(pairs), TGT_LEN)}
    ids, segments = ([torch.zeros(shapes[side], dtype=torch.int64) for side in (0, 1)] for _ in range(2))
    for side in (0, 1):
        for row, in_row in enumerate(pairs):
            joined = torch.cat([pair[side] for pair in in_row])
            numbers = [torch.full((len(pair[side]),), number) for number, pair in enumerate(in_row, start=1)]
            ids[side][row, : len(joined)] = joined
            segments[side][row, : len(joined)] = torch.cat(numbers)
    return *ids, Packing(*segments)


def run(model, batches):
    """Logits of all real target positions of the batches, in their order, and the gradient of the sum of squares."""
    model.zero_grad()
    logits = [model(src, tgt, packing=packing)[real] for src, tgt, packing, real in batches]
    torch.cat(logits).square().sum().backward()
    return torch.cat(logits).detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_packed_pairs_equal_pairs_alone(build, changes):
    """Logits of real positions, and gradients."""
    model, pairs = build(num_encoder_layers=1, num_decoder_layers=1, **changes), random_pairs()
    src, tgt, packing = packed(pairs)
    alone = [(s[None], t[None], None, torch.ones(1, len(t), dtype=torch.bool)) for row in pairs for s, t in row]
    expected, expected_gradients = run(model, alone)
    logits, gradients = run(model, [(src, tgt, packing, packing.tgt_segments != 0)])
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-13)
    for name, gradient in gradients.items():
        scale = expected_gradients[name].abs().max().clamp(min=1.0)
        torch.testing.assert_close(gradient / scale, expected_gradients[name] / scale, rtol=0, atol=1e-13)


@pytest.mark.parametrize("changes", VARIANTS[:4], ids=str)
def test_neighbours_in_a_row_change_nothing(build, changes):
    """To the last bit. The neighbours' own logits do change."""
    model = build(num_encoder_layers=1, num_decoder_layers=1, **changes)
    src, tgt, packing = packed(random_pairs())
    changed = [
        torch.where((segments == 1) | (ids == 0), ids, 60 + ids % 7)
        for ids, segments in zip((src, tgt), packing, strict=True)
    ]
    with torch.no_grad():
        before, after = model(src, tgt, packing=packing), model(*changed, packing=packing)
    mine, others = packing.tgt_segments == 1, packing.tgt_segments > 1
    assert torch.equal(before[mine], after[mine])
    assert (before[others] != after[others]).any(dim=-1).all()


def test_segments_say_what_is_padding(build):
    """Where the id of padding starts every target, too."""
    model = build(bos_id=0)
    src, tgt, packing = packed(random_pairs())
    first = torch.where(tgt == 1, 0, tgt)
    alone = model(src[1:2, :5], first[1:2, :4], packing=Packing(*(torch.ones(1, n).long() for n in (5, 4))))
    whole = model(src, first, packing=packing)
    torch.testing.assert_close(whole[1:2, :4], alone, rtol=0, atol=1e-13)


def test_encoding_and_decoding_apart(build):
    model = build()
    src, tgt, packing = packed(random_pairs())
    memory = model.encode(src, packing=packing)
    apart = model.decode(tgt, memory, src_mask=packing.src_segments != 0, packing=packing)
    assert torch.equal(apart, model(src, tgt, packing=packing))
