import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from torch_reference.decoding import greedy


@pytest.fixture
def model(build):
    """An untied model that ends some sentences of the fixture early: eos_id is likely, but not always the likeliest."""
    model = build(tie_embeddings="none")
    with torch.no_grad():
        model.output_projection.bias[2] = 0.5
        model.output_projection.bias[0] += 50.0  # what must never be chosen would otherwise always be
        model.output_projection.bias[1] += 50.0
    return model


@pytest.fixture
def src():
    src = torch.randint(4, 60, (12, 7), generator=torch.Generator().manual_seed(2))
    for row in range(12):
        src[row, 2 + row % 6 :] = 0
    src[11] = 0
    return src


def test_output_ends_with_eos_and_is_padding_after_it(model, src):
    output = greedy(model, src, max_len=9)
    assert output.shape == (12, 9)
    assert output.dtype == src.dtype
    lengths = []
    for row in output[:11].tolist():
        length = row.index(2) + 1 if 2 in row else 9
        lengths.append(length)
        assert all(piece not in (0, 1) for piece in row[:length])
        assert row[length:] == [0] * (9 - length)
    assert min(lengths) < 9
    assert len(set(lengths)) > 1
    assert output[11].tolist() == [0] * 9


def test_every_piece_is_the_likeliest_after_those_before_it(model, src):
    output = greedy(model, src, max_len=9)
    logits = model(src, F.pad(output, (1, 0), value=1)[:, :-1])
    logits[..., :2] = -torch.inf
    real = output != 0
    assert torch.equal(logits.argmax(dim=-1)[real], output[real])


def test_a_sentence_does_not_depend_on_its_neighbours(model, src):
    """D3."""
    together = greedy(model, src, max_len=9)
    for row in range(12):
        length = int((src[row] != 0).sum())
        assert torch.equal(greedy(model, src[row : row + 1, : max(length, 1)], max_len=9)[0], together[row])
    assert torch.equal(greedy(model, src, max_len=4), together[:, :4])


def test_special_ids_may_coincide(build, src):
    """Marian starts targets with pad_id, fairseq with eos_id."""
    model = build(tie_embeddings="none", bos_id=0)
    output = greedy(model, src, max_len=5)
    tgt = F.pad(output, (1, 0), value=0)[:, :-1]
    mask = torch.ones_like(tgt, dtype=torch.bool)
    logits = model.decode(tgt, model.encode(src), src_mask=src != 0, tgt_mask=mask)
    logits[..., 0] = -torch.inf
    assert torch.equal(logits.argmax(dim=-1)[output != 0], output[output != 0])
    model = build(tie_embeddings="none", bos_id=2)
    with torch.no_grad():
        model.output_projection.bias[2] += 50.0
    assert greedy(model, src, max_len=5)[0].tolist() == [2, 0, 0, 0, 0]


def test_max_len_is_checked(build, src):
    with pytest.raises(ValueError, match=r"expected max_len in \[1, 33\], got 34"):
        greedy(build(positions="learned"), src, max_len=34)
    with pytest.raises(ValueError, match=r"expected max_len in \[1, any\], got 0"):
        greedy(build(), src, max_len=0)
