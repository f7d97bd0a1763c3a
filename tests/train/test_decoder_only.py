"""Source and answer in one row of a decoder: what is predicted, who sees what, and parameters that are shared."""

import pytest
import torch
from torch.testing import assert_close

from multimodal.data.datasets.text import IGNORED
from multimodal.train.objectives.text.decoder_only import JoinPairs, decoder_only, joined_logits, share_parameters
from multimodal.train.objectives.text.denoising import SizeSettings, encoder_decoder
from multimodal.train.objectives.text.translation import Pair
from tests.helpers.tiny import randomized

SIZE = SizeSettings(width=16, encoder_layers=2, decoder_layers=2, heads=2, context=16)
PAIRS = [Pair([5, 6, 7, 3], [0, 8, 9, 3]), Pair([5, 3], [0, 9, 3])]


def test_the_answer_alone_is_predicted_or_the_whole_row():
    batch = JoinPairs(1)(PAIRS)
    assert batch.ids.tolist() == [[5, 6, 7, 3, 0, 8, 9, 1], [5, 3, 0, 9, 1, 1, 1, 1]]
    assert batch.targets.tolist() == [[IGNORED] * 4 + [8, 9, 3, IGNORED], [IGNORED] * 2 + [9, 3] + [IGNORED] * 4]
    assert batch.given is None
    assert JoinPairs(1, whole=True)(PAIRS).targets[0].tolist() == [6, 7, 3, 0, 8, 9, 3, IGNORED]
    assert JoinPairs(1, prefix=True)(PAIRS).given.sum(1).tolist() == [4, 2]


@pytest.mark.parametrize("prefix", [False, True])
def test_a_batch_gives_what_each_row_gives_alone(prefix):
    model, join = randomized(decoder_only(20, 0, SIZE)), JoinPairs(1, prefix)
    logits, targets = joined_logits(model, join(PAIRS))
    alone = [joined_logits(model, join([pair])) for pair in PAIRS]
    assert_close(logits, torch.cat([own for own, _ in alone]))
    assert targets.tolist() == [8, 9, 3, 9, 3]


def test_only_a_prefix_sees_what_comes_later_in_the_source():
    model = randomized(decoder_only(20, 0, SIZE))
    seen: list[torch.Tensor] = []
    model.stack.blocks[0].register_forward_hook(lambda _, __, out: seen.append(out))
    for prefix in (False, True):
        for source in ([5, 6, 3], [5, 7, 3]):
            joined_logits(model, JoinPairs(1, prefix)([Pair(source, [0, 8, 3])]))
    causal, other, whole, changed = seen
    assert torch.equal(causal[0, 0], other[0, 0])
    assert not torch.equal(whole[0, 0], changed[0, 0])


def test_the_decoder_is_t5s_without_cross_attention():
    torch.manual_seed(3)
    whole = encoder_decoder(20, "t5", 0, SIZE).decoder.state_dict()
    torch.manual_seed(3)
    model = decoder_only(20, 0, SIZE)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())
    assert all("cross" in name for name in whole.keys() - model.state_dict().keys())


def test_both_sides_share_their_parameters():
    count = lambda model: sum(p.numel() for p in model.parameters())
    model = encoder_decoder(20, "t5", 0, SIZE)
    before = count(model)
    own = count(model.encoder.stack.blocks)
    shared = share_parameters(model)
    assert count(shared) == before - own
    shared(torch.tensor([[5, 6]]), torch.tensor([[0, 7]])).sum().backward()
    first = shared.encoder.stack.blocks[0].feed.up.weight
    assert first is shared.decoder.stack.blocks[0].feed.up.weight
    assert first.grad.abs().sum() > 0
