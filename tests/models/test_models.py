"""Models: a batch equals its rows alone, a cache equals the full pass, images of any size, limits said."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from multimodal.blocks import masks
from multimodal.blocks.capture import capture_attention
from multimodal.blocks.masks import causal, documents, padding
from multimodal.export.graphs import Method
from multimodal.models.conformer import ConformerEncoder
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from tests.helpers.spread import thin
from tests.helpers.tiny import (
    ALL,
    CLIPS,
    CONFORMERS,
    EOS,
    TEXTS,
    VITS,
    VOCABULARY,
    WIDTH,
    conformer,
    made,
    noise,
    outputs,
    randomized,
    text,
    tokens,
)  # fmt: skip

JUNK = [1e4, float("nan")]


def spoken(width: int, lengths: torch.Tensor, junk: float) -> torch.Tensor:
    x = noise(len(lengths), int(lengths.max()), width)
    x[~padding(lengths, x.shape[1])] = junk
    return x


# images


@pytest.mark.parametrize("name", VITS)
def test_vit_of_a_batch_is_that_of_each_alone(name):
    model, images = made(f"vit-{name}"), noise(3, 3, 8, 12)
    out = model(images)
    assert out.shape == (3, model.config.classes or WIDTH)
    for row in range(3):
        assert_close(out[row : row + 1], model(images[row : row + 1]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", VITS)
def test_image_of_another_size_equals_a_model_with_timms_positions(name):
    from timm.layers import resample_abs_pos_embed

    model, config = made(f"vit-{name}"), VITS[name]
    own = config.prefix if config.positions_on_prefix else 0
    larger = ViT(replace(config, image=(16, 12))).eval()
    positions = resample_abs_pos_embed(model.positions[None], [4, 3], [2, 3], num_prefix_tokens=own)[0]
    larger.load_state_dict(model.state_dict() | {"positions": positions})
    images = noise(2, 3, 16, 12)
    assert_close(model(images), larger(images), atol=1e-5, rtol=0)
    assert torch.equal(model.grid_positions((2, 3))[config.prefix - own :], model.positions)


def test_image_that_patches_do_not_tile_is_refused():
    for size in ((9, 12), (8, 13)):
        with pytest.raises(ValueError, match=f"must be a multiple of the patch 4 .got {size[0]}x{size[1]}"):
            made("vit-token")(noise(1, 3, *size))


def test_pools_equal_their_definitions():
    images = noise(2, 3, 8, 12)
    for name, pool in {
        "token": lambda m, x: m.head(x[:, 0]),
        "mean": lambda m, x: m.head(m.norm(x.mean(1))),
        "registers": lambda m, x: m.head(x[:, 0]),
        "registers-mean": lambda m, x: m.head(x[:, 4:].mean(1)),
    }.items():
        model = made(f"vit-{name}")
        assert_close(model(images), pool(model, model.tokens(images)), atol=1e-6, rtol=0)


def test_prefix_tokens_come_first_and_patches_row_by_row():
    model, images = made("vit-registers"), noise(2, 3, 8, 12)
    stem = model.stem(images)
    assert torch.equal(stem[0, :4], torch.cat([model.class_token, model.registers]))
    patch = images[1, :, 4:8, 0:4]  # row 1, column 0 of a grid of 2 by 3
    expected = (model.embed.weight * patch).sum((1, 2, 3)) + model.embed.bias + model.positions[3]
    assert_close(stem[1, 4 + 3], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["token", "registers", "map"])
def test_dropped_patches_are_not_seen(name):
    model, images = made(f"vit-{name}"), noise(2, 3, 8, 12)
    everything = torch.arange(6).expand(2, -1)
    assert torch.equal(model(images, everything), model(images))
    keep, other = torch.tensor([[0, 3, 4], [0, 3, 4]]), images.clone()
    other[:, :, :4, 4:] = 9.0  # patches 1 and 2
    assert torch.equal(model(images, keep), model(other, keep))
    assert not torch.equal(model(images), model(other))


# images and texts


@pytest.mark.parametrize("name", ["softmax", "masked"])
def test_clip_text_does_not_depend_on_what_follows_it(name):
    model, ids, lengths = made(f"clip-{name}"), tokens(3, 9), torch.tensor([9, 5, 2])
    ids[torch.arange(3), lengths - 1] = EOS
    ids[1, 7] = EOS  # junk after the end
    out = model.encode_text(ids, padding(lengths, 9))
    assert_close(out.norm(dim=-1), torch.ones(3))
    for row, length in enumerate(lengths.tolist()):
        alone = model.encode_text(ids[row : row + 1, :length])
        assert_close(out[row : row + 1], alone, atol=1e-5, rtol=0)


@pytest.mark.ci
def test_the_text_tower_of_clip_is_exported_with_rows_without_an_end_as_nan():
    model, ids = made("clip-softmax").eval(), tokens(2, 6)
    ids[0, 3] = EOS
    ids[1] = EOS - 1
    graph = torch.export.export(Method(model, "encode_text"), (ids,)).module()
    assert_close(graph(ids)[0], model.encode_text(ids[:1])[0])
    assert graph(ids)[1].isnan().all()
    with pytest.raises(ValueError, match="no end-of-text id"):
        model.encode_text(ids)


def test_clip_scores_are_scaled_cosines():
    images, ids = noise(2, 3, 8, 12), tokens(3, 6)
    ids[:, -1] = EOS
    for name in CLIPS:
        model = made(f"clip-{name}")
        cosines = model.encode_image(images) @ model.encode_text(ids).T
        shift = model.logit_bias if name == "sigmoid" else 0.0
        assert_close(model(images, ids), cosines * model.logit_scale.exp() + shift)
        assert (model.logit_bias is not None) == (name == "sigmoid")


def test_sigmoid_text_pools_the_last_position_as_given():
    model, ids = made("clip-sigmoid"), tokens(2, 7)
    expected = model.text_project(model.text.states(ids)[:, -1])
    assert_close(model.encode_text(ids), expected / expected.norm(dim=-1, keepdim=True), atol=1e-6, rtol=0)


def test_clip_text_without_an_end_is_refused():
    with pytest.raises(ValueError, match=f"end-of-text id {EOS}"):
        made("clip-softmax").encode_text(tokens(2, 6))


@pytest.mark.parametrize("causal", [True, False])
def test_text_of_a_batch_is_that_of_each_alone(causal):
    model, ids, lengths = randomized(TextTransformer(text(causal, tied=True))), tokens(3, 9), torch.tensor([9, 5, 1])
    out = model(ids, valid=padding(lengths, 9))
    for row, length in enumerate(lengths.tolist()):
        assert_close(out[row, :length], model(ids[row : row + 1, :length])[0], atol=1e-5, rtol=0)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", TEXTS)
def test_text_padded_on_the_left_is_that_of_each_alone(name):
    model, ids, start = made(f"text-{name}"), tokens(3, 9), torch.tensor([0, 4, 8])
    cache, places = model.new_cache(start), torch.arange(9) - start[:, None]
    cached = torch.cat([model(ids[:, :6], cache=cache), model(ids[:, 6:], cache=cache)], 1)
    whole = model.logits(model.states(ids, valid=places >= 0, positions=places))
    for row, first in enumerate(start.tolist()):
        alone = model(ids[row : row + 1, first:])[0]
        assert_close(cached[row, first:], alone, atol=1e-5, rtol=0)
        assert_close(whole[row, first:], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in ("window", "linear")])
def test_packed_documents_are_those_of_each_alone(name):
    model, parts = made(f"text-{name}"), [tokens(1, length, seed=length) for length in (5, 3, 4)]
    ids, document = torch.cat(parts, 1), torch.tensor([[0] * 5 + [1] * 3 + [2] * 4])
    places = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    packed = model.logits(model.states(ids, mask=documents(document) & causal(12, 12), positions=places))
    assert_close(packed, torch.cat([model(part) for part in parts], 1), atol=1e-5, rtol=0)


def test_causal_text_states_do_not_depend_on_later_tokens():
    for one_way in (True, False):
        model, ids = randomized(TextTransformer(text(one_way))), tokens(2, 8)
        other = torch.cat([ids[:, :5], tokens(2, 3, seed=9)], 1)
        assert torch.allclose(model.states(ids)[:, :5], model.states(other)[:, :5], atol=1e-6) == one_way


def test_text_longer_than_the_context_is_refused():
    model = randomized(TextTransformer(text(tied=True)))
    with pytest.raises(ValueError, match="text of 13 tokens is longer than the context 12"):
        model(tokens(1, 13))
    cache = model.new_cache()
    model(tokens(1, 12), cache=cache)
    with pytest.raises(ValueError, match="text of 13 tokens"):
        model(tokens(1, 1), cache=cache)


def test_logits_are_tied_to_the_embedding_or_have_their_own_map():
    tied, free = (randomized(TextTransformer(text(tied=kind))) for kind in (True, False))
    ids = tokens(2, 5)
    assert_close(tied(ids), tied.states(ids) @ tied.embed.weight.T, atol=1e-5, rtol=0)
    assert_close(free(ids), free.states(ids) @ free.head.weight.T, atol=1e-5, rtol=0)
    assert "head.weight" not in tied.state_dict()


def test_caption_of_a_batch_is_that_of_each_alone():
    model, images, ids, lengths = made("captioner"), noise(3, 3, 8, 12), tokens(3, 7), torch.tensor([7, 4, 1])
    out = model(images, ids, padding(lengths, 7))
    for row, length in enumerate(lengths.tolist()):
        alone = model(images[row : row + 1], ids[row : row + 1, :length])
        assert_close(out[row : row + 1, :length], alone, atol=1e-5, rtol=0)


# speech


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("name", CONFORMERS)
def test_conformer_of_a_batch_is_that_of_each_alone(name, junk):
    model, lengths = made(f"conformer-{name}"), torch.tensor([37, 20, 9, 1])
    features = spoken(WIDTH if model.stem is None else 8, lengths, junk)
    out, kept = model(features, lengths)
    assert (out[~padding(kept, out.shape[1])] == 0).all()
    for row, (length, frames) in enumerate(zip(lengths.tolist(), kept.tolist(), strict=True)):
        alone, own = model(features[row : row + 1, :length], lengths[row : row + 1])
        assert own.tolist() == [frames]
        assert alone.shape[1] == frames == -(-length // model.config.subsample)
        assert_close(out[row, :frames], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("name", ["joint", "joint-ctc-alone"])
def test_joint_conformer_of_a_batch_is_that_of_each_alone(name, junk):
    model, lengths, ids = made(name), torch.tensor([37, 20, 9]), tokens(3, 6)
    features = spoken(8, lengths, junk)
    out, kept, decoded = model(features, lengths, ids)
    assert out.shape[-1] == model.config.blank + 1 == VOCABULARY + 1
    for row, (length, frames) in enumerate(zip(lengths.tolist(), kept.tolist(), strict=True)):
        alone, _, said = model(features[row : row + 1, :length], lengths[row : row + 1], ids[row : row + 1, : row + 3])
        assert_close(out[row, :frames], alone[0], atol=1e-5, rtol=0)
        if name == "joint":
            assert_close(decoded[row, : row + 3], said[0], atol=1e-5, rtol=0)
        else:
            assert decoded is said is None


def test_chunked_conformer_does_not_look_past_its_chunk():
    model, lengths = made("conformer-chunk"), torch.tensor([48])
    features = noise(1, 48, 8).requires_grad_()
    for frame in range(12):
        (gradient,) = torch.autograd.grad(model(features, lengths)[0][0, frame].abs().sum(), features)
        reached = gradient[0].abs().sum(-1).nonzero().max().item()
        end = (frame // 2 + 1) * 8  # two frames of four make a chunk
        assert end - 4 <= reached < end


def test_chunk_with_a_convolution_that_sees_the_future_is_refused():
    for options in ({}, {"conv_causal": True, "conv_norm": "group"}):
        with pytest.raises(ValueError, match="chunk 2 needs conv_causal"):
            ConformerEncoder(conformer(chunk=2, **options))


def test_speech_to_text_of_a_batch_is_that_of_each_alone():
    model, ids = made("speech-to-text"), tokens(3, 6)
    for frames in (20, 14, 7):
        mel = noise(3, 8, frames)
        out = model(mel, ids)
        for row in range(3):
            alone = model(mel[row : row + 1], ids[row : row + 1, : row + 2])
            assert_close(out[row : row + 1, : row + 2], alone, atol=1e-5, rtol=0)


def test_sound_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match=r"mel must have at most 20 frames \(got 21\)"):
        made("speech-to-text").encoder(noise(1, 8, 21))


# all


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("steps", [[1] * 8, [4, 1, 2, 1], [1, 7]])
@pytest.mark.parametrize(
    "name", ["speech-to-text", "joint", "captioner", "text-to-text", *map("text-{}".format, TEXTS)]
)
def test_cached_decoding_equals_the_full_pass(name, steps):
    model, ids, lengths = made(name), tokens(3, 8), torch.tensor([36, 20, 9])
    source = source_valid = None
    decoder = model.decoder if hasattr(model, "decoder") else model
    if name == "joint":
        source, source_valid, _ = model.encode(spoken(8, lengths, 1e4), lengths)
    elif name == "text-to-text":
        source_valid = padding(torch.tensor([9, 4, 1]), 9)
        source = model.encode(tokens(3, 9, seed=1), source_valid)
    elif decoder is not model:
        source = model.encode(noise(3, 3, 8, 12)) if name == "captioner" else model.encoder(noise(3, 8, 20))
    full, cache, done = decoder(ids, source, source_valid), decoder.new_cache(), 0
    for step in steps:
        part = decoder(ids[:, done : done + step], source, source_valid, cache=cache)
        assert_close(part, full[:, done : done + step], atol=1e-4, rtol=0)
        done += step
    if name == "text-window":  # what it has let go cannot come back
        return
    rows = torch.tensor([2, 0])
    cache.cut(5)
    cache.reorder(rows)
    source, source_valid = (None if given is None else given[rows] for given in (source, source_valid))
    part = decoder(ids[rows, 5:], source, source_valid, cache=cache)
    assert_close(part, full[rows, 5:], atol=1e-4, rtol=0)


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", ALL)
def test_every_weight_takes_part(name):
    model = made(name)
    outputs(model).square().sum().backward()
    fixed = {"audio.positions", "encoder.positions" if name == "speech-to-text" else ""}
    for parameter, tensor in model.named_parameters():
        if parameter in fixed:
            assert not tensor.requires_grad
        else:
            assert tensor.grad is not None, parameter
            # keys that are all moved alike weigh the same in a softmax
            assert parameter.endswith("key.bias") or tensor.grad.abs().max() > 0, parameter


@pytest.mark.parametrize("name", ["learned", "rotary", "alibi", "shaw", "llama", "window"])
def test_causal_attention_without_a_mask_is_the_same(name, monkeypatch):
    model, ids = made(f"text-{name}"), tokens(2, 9)
    expected, padded = model(ids), model(ids, valid=padding(torch.tensor([9, 4]), 9))
    seen = []
    attend = masks.Causal.attend
    monkeypatch.setattr(masks.Causal, "attend", lambda self, *parts: seen.append(1) or attend(self, *parts))
    monkeypatch.setattr("multimodal.models.text.UNMASKED", ("cpu",))
    assert_close(model(ids), expected, atol=1e-5, rtol=0)
    assert bool(seen) == (name in ("learned", "rotary", "llama"))
    assert_close(model.states(ids, only=torch.tensor([3, 8]))[1, 0], model.states(ids)[1, 8], atol=1e-5, rtol=0)
    assert_close(model(ids, valid=padding(torch.tensor([9, 4]), 9)), padded, atol=0, rtol=0)
    cache = model.new_cache()
    parts = [model(ids[:, :4], cache=cache), model(ids[:, 4:], cache=cache)]
    assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=0)
    with capture_attention() as weights:
        model(ids)
    assert len(weights) == 2


@pytest.mark.parametrize("name", ["learned", "rotary", "llama", "window"])
def test_long_prompts_are_read_in_causal_order_without_a_mask(name, monkeypatch):
    model, ids = made(f"text-{name}"), tokens(2, 9)
    expected, shifted = model(ids), torch.tensor([0, 2])
    padded = model(ids, cache=model.new_cache(shifted))
    seen, attend = [], masks.Causal.attend
    monkeypatch.setattr(masks.Causal, "attend", lambda self, *parts: seen.append(1) or attend(self, *parts))
    monkeypatch.setattr("multimodal.models.text.FEW", 5)
    cache = model.new_cache(capacity=12)
    parts = [model(ids[:, :6], cache=cache), model(ids[:, 6:], cache=cache)]
    assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=0)
    assert len(seen) == (0 if name == "window" else model.config.stack.layers)  # the second part has a mask
    seen.clear()
    assert_close(model(ids, cache=model.new_cache(shifted)), padded, atol=0, rtol=0)
    assert_close(model(ids[:, :5], cache=model.new_cache()), expected[:, :5], atol=1e-5, rtol=0)
    assert not seen
