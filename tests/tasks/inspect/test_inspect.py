"""Inspection: the model's own numbers, unchanged outputs, and one-line errors."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from multimodal.blocks.capture import capture_attention
from multimodal.errors import TextError, UsageError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig
from multimodal.models.vit import ViT
from multimodal.models.whisper import Whisper, WhisperEncoderConfig
from multimodal.tasks.caption.regions import attention_by_head
from multimodal.tasks.inspect.alignment import AlignmentRequest, alignment
from multimodal.tasks.inspect.maps import AttentionMap, Axis, attention, fitting, names
from multimodal.tasks.inspect.numbers import chosen, filters, mean_distances, over_image, position_similarity
from multimodal.weights.folder import Checkpoint
from tests.helpers.spread import thin
from tests.helpers.tiny import SPEECH, VIT, VITS, WIDTH, randomized, text
from tests.helpers.tiny_checkpoints import BYTES, IDS, RECORD, checkpoint, source_of

# ---- outputs stay the same to the bit


def outputs(kind: str) -> list[Tensor]:
    torch.manual_seed(0)
    model, ids = checkpoint(kind).model, torch.randint(3, IDS, (2, 7))
    if kind in ("vit", "clip"):
        return [model.encode_image(torch.randn(2, 3, 8, 12)) if kind == "clip" else model(torch.randn(2, 3, 8, 12))]
    if kind == "captioner":
        return [model(torch.randn(2, 3, 8, 12), ids)]
    if kind == "joint":
        logits, _, decoded = model(torch.randn(2, 40, 8), torch.tensor([40, 31]), ids)
        return [logits, decoded]
    return [model(ids, ids) if kind == "text-to-text" else model(ids)]


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["learned", "llama", "alibi", "text-to-text", "vit", "clip", "captioner", "joint"])
def test_capturing_leaves_the_outputs_equal_to_the_bit(kind):
    plain = outputs(kind)
    with torch.no_grad():
        inference = outputs(kind)
        with capture_attention() as seen:
            captured = outputs(kind)
    with capture_attention():
        graded = outputs(kind)
    assert seen
    assert all(torch.equal(a, b) for a, b in zip(plain, graded, strict=True))
    if kind != "vit" and kind != "clip":  # which without gradients otherwise compute the last block for one token
        assert all(torch.equal(a, b) for a, b in zip(inference, captured, strict=True))


# ---- attention


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["rotary", "llama", "bucket", "encoder", "text-to-text", "vit", "clip", "captioner",
                                  "joint"])  # fmt: skip
def test_weights_have_a_row_a_position_and_sum_to_one(files, kind):
    seen = attention(checkpoint(kind), source_of(files, kind))
    heads = 4 if kind == "llama" else 2
    assert seen.weights.shape[:2] == (2, heads)
    assert seen.weights.shape[-1] == seen.weights.shape[-2]
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(seen.weights.shape[:-1]))
    if seen.keys.unit == "token":
        assert len(seen.keys.names) == seen.weights.shape[-1]


def test_weights_are_the_models_own():
    one = checkpoint("rotary")
    seen = attention(one, "abc")
    ids = torch.tensor([[BYTES.bos_id, *BYTES.encode("abc")]])
    states: list[Tensor] = []
    with torch.no_grad():
        one.model.states(ids, states=states)
    block = one.model.stack.blocks[1]
    x = block.attention_branch.norm(states[1])
    query, key = (block.attention.split(part(x)) for part in (block.attention.query, block.attention.key))
    from multimodal.models.text_config import rotary_positions

    rotate = rotary_positions(one.model.config.positions, torch.arange(4), one.model.config.stack.block.attention)
    scores = rotate(query) @ rotate(key).mT * block.attention.scale
    expected = scores.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -math.inf).softmax(-1)
    torch.testing.assert_close(seen.weights[1], expected[0], atol=1e-6, rtol=1e-5)
    assert seen.keys.names[1:] == ("a", "b", "c")


def test_a_image_shows_what_its_class_token_sees():
    weights = torch.zeros(1, 1, 7, 7)
    weights[..., 0, 3], weights[..., 1:, 5] = 1.0, 1.0
    axis = Axis("patch", (), 4, (2, 3), 1)
    assert over_image(weights, axis, True)[0, 0].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert over_image(weights, axis, False)[0, 0].tolist() == [[0, 0, 0], [0, 1, 0]]


def test_layers_and_heads_are_chosen_and_counted():
    weights = torch.arange(6.0).view(2, 3, 1, 1)
    assert chosen(weights, None, None).weights.flatten().tolist() == [3, 4, 5]
    assert chosen(weights, "all", 1).weights.flatten().tolist() == [1, 4]
    assert chosen(weights, 0, 2).weights.flatten().tolist() == [2]
    with pytest.raises(UsageError, match=r"layer must be in \[0, 1\] \(got 2\)"):
        chosen(weights, 2, None)
    with pytest.raises(UsageError, match=r"head must be in \[0, 2\] \(got 3\)"):
        chosen(weights, None, 3)


def test_tokens_are_named_with_their_spaces():
    ids = [BYTES.bos_id, *BYTES.encode("a b\né")]
    assert names(BYTES, ids)[1:5] == ("a", "␣", "b", "↵")
    assert names(BYTES, ids)[5:] == tuple(f"#{i}" for i in ids[5:])  # halves of a letter


# ---- distances, filters, positions


def test_distances_are_means_over_the_attention():
    line = torch.eye(4)[None, None].roll(1, -1)  # each to the next, the last to the first
    seen = AttentionMap(line, *[Axis("second", step=0.5)] * 2)
    assert mean_distances(seen).item() == pytest.approx(0.5 * (1 + 1 + 1 + 3) / 4)
    grid = torch.zeros(1, 1, 7, 7)
    grid[..., 6] = 0.25  # the last patch, at row 1 and column 2
    grid[..., 0] = 0.75  # the class token, which is nowhere
    axis = Axis("patch", (), 16, (2, 3), 1)
    apart = [math.hypot(1 - row, 2 - column) for row in range(2) for column in range(3)]
    assert mean_distances(AttentionMap(grid, axis, axis)).item() == pytest.approx(16 * sum(apart) / 6)


def test_filters_are_principal_components():
    model = randomized(ViT(VIT))
    first, second = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    second -= (second * first).sum() / (first * first).sum() * first
    mix = torch.randn(WIDTH, 2)
    mix = torch.linalg.qr(mix - mix.mean(0)).Q * torch.tensor([2.0, 1.0])
    made = mix[:, 0, None, None, None] * first / first.norm() + mix[:, 1, None, None, None] * second / second.norm()
    model.embed.weight.data.copy_(made + 5)
    components, shares = filters(model)
    assert shares[:3].tolist() == pytest.approx([0.8, 0.2, 0.0], abs=1e-5)
    expected = (first / first.norm()).permute(1, 2, 0)
    assert abs(float((components[0] * expected).sum())) == pytest.approx(1, abs=1e-4)


def test_positions_are_compared_by_cosine():
    vit = randomized(ViT(VITS["registers"]))
    vit.requires_grad_(False)
    values, axis = position_similarity(vit)
    assert (values.shape, axis.grid) == ((6, 6), (2, 3))
    expected = torch.nn.functional.cosine_similarity(vit.positions[0], vit.positions[4], 0)
    assert values[0, 4].item() == pytest.approx(float(expected), abs=1e-6)
    model = randomized(ViT(VIT)).requires_grad_(False)  # whose class token has a position too
    expected = torch.nn.functional.cosine_similarity(model.positions[1], model.positions[6], 0)
    assert position_similarity(model)[0][0, 5].item() == pytest.approx(float(expected), abs=1e-6)
    waves = TextTransformer(replace(text(), context=2000, positions=PositionConfig("sinusoidal")))
    values, axis = position_similarity(waves)
    assert (values.shape[0], axis.step) == (500, 4)
    torch.testing.assert_close(values[3, 8], values[103, 108])  # a sinusoid's cosine goes by distance
    with pytest.raises(UsageError, match=r"has no position embeddings \(positions: rotary\)"):
        position_similarity(checkpoint("rotary").model)


# ---- alignment


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["text-to-text", "captioner", "joint"])
@pytest.mark.parametrize("answer", ["xyz", None])
def test_an_alignment_has_a_row_a_token(files, kind, answer):
    seen = alignment(checkpoint(kind), AlignmentRequest(source_of(files, kind), answer))
    assert len(seen.queries.names) == seen.weights.shape[2]
    if answer:
        assert seen.queries.names[:3] == ("x", "y", "z")
        assert seen.weights.shape[2] == 4  # and the end
    if kind != "captioner":  # whose class token is no patch
        torch.testing.assert_close(seen.weights.sum(-1), torch.ones(seen.weights.shape[:-1]))


def test_a_tokens_row_is_of_the_position_that_chose_it():
    one = checkpoint("text-to-text")
    seen = alignment(one, AlignmentRequest("ab", "xyz"))
    source = torch.tensor([[BYTES.bos_id, *BYTES.encode("ab"), BYTES.eos_id]])
    ids = torch.tensor([[0, *BYTES.encode("xyz")]])
    with torch.no_grad():
        states = one.model.encode(source)
        with capture_attention() as kept:
            one.model.decode(ids, states)
    cross = [weights[0] for module, weights in kept if module is one.model.decoder.stack.blocks[1].cross]
    torch.testing.assert_close(seen.weights[1], cross[0])
    assert len(seen.keys.names) == source.shape[1]


def test_a_caption_is_aligned_as_its_regions_are(files):
    one = checkpoint("captioner")
    seen = alignment(one, AlignmentRequest(str(files["image"]), "hi"))
    from multimodal.tasks.encode.images import pixels_of_one

    ids = [BYTES.bos_id, *BYTES.encode("hi"), BYTES.eos_id]
    maps = attention_by_head(one.model, pixels_of_one(files["image"], RECORD), ids).mean((0, 1))
    torch.testing.assert_close(seen.weights.mean((0, 1)), maps.flatten(1))


def test_a_translators_own_answer_is_greedy():
    one = checkpoint("text-to-text")
    seen = alignment(one, AlignmentRequest("ab"))
    ids = [0]
    with torch.no_grad():
        source = one.model.encode(torch.tensor([[BYTES.bos_id, *BYTES.encode("ab"),
                                                 BYTES.eos_id]]))  # fmt: skip
        while len(ids) < 31 and (len(ids) == 1 or ids[-1] != BYTES.eos_id):
            ids.append(int(one.model.decode(torch.tensor([ids]), source)[0, -1].argmax()))
    said = [i for i in ids[1:] if i != BYTES.eos_id]
    assert seen.queries.names[:-1] == names(BYTES, said)[: len(seen.queries.names) - 1]


def test_whisper_windows_are_in_seconds(files):
    config = replace(SPEECH, encoder=WhisperEncoderConfig(8, 20, SPEECH.encoder.stack))
    model = randomized(Whisper(config))
    with pytest.warns(UserWarning, match=r"has 0.5 s, only the first 0.4 s are used"):
        seen = attention(Checkpoint(model, source="w"), str(files["sound"]))
    assert seen.weights.shape == (2, 2, 20, 20)
    assert (seen.keys.unit, seen.keys.step) == ("second", 0.02)


def test_an_empty_text_is_refused():
    with pytest.raises(TextError, match="text: is empty"):
        fitting("text", [], 8)
