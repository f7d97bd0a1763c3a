"""Captions by every way of decoding: what the options mean, batched as alone, and what is refused or said."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal import caption
from multimodal.errors import CheckpointError, ImageError, MultimodalError, TextError, UsageError
from multimodal.inference import cuda_graphs
from multimodal.tasks.caption.caption import CaptionWriter, caption_many, prepared
from multimodal.tasks.caption.options import CaptionOptions, options_for
from multimodal.tasks.encode.images import pixels_of
from multimodal.weights.folder import Checkpoint
from tests.helpers.data.captions import CONTEXT, RECORD, written
from tests.helpers.spread import thin
from tests.helpers.tiny import ALL, randomized

pytestmark = pytest.mark.filterwarnings("ignore:.*the caption is empty")  # of one image it is


@pytest.fixture(scope="module")
def captioner() -> Checkpoint:
    return written(end=2.0)


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    random = np.random.default_rng(0)
    shapes = [(20, 30), (16, 16), (50, 40), (33, 21), (16, 40)]
    return [Image.fromarray(random.integers(0, 255, (*shape, 3), np.uint8)) for shape in shapes]


WAYS = {
    "greedy": {},
    "beam": {"beam_size": 4},
    "beams": {"beam_size": 4, "num_captions": 3, "length_penalty": 0.0},
    "processors": {"beam_size": 3, "no_repeat_ngram": 2, "min_tokens": 4, "repetition_penalty": 1.4},
    "greedy-processors": {"no_repeat_ngram": 1, "min_tokens": 6, "repetition_penalty": 1.4},
    "nucleus": {"top_p": 0.9, "seed": 3, "num_captions": 3},
    "top-k": {"top_k": 5, "temperature": 0.7, "min_tokens": 2},
    "prompt": {"prompt": "a red", "beam_size": 2, "no_repeat_ngram": 2},
}


@thin(2, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_any_size_gives_what_each_image_gives_alone(captioner, images, way):
    write = CaptionWriter(*prepared(captioner, "float32", None, WAYS[way]))
    pixels = pixels_of(images, RECORD)
    alone = [write(one[None])[0] for one in pixels]
    assert len({tuple(found[0].ids) for found in alone}) > 2
    for found, own in zip(write(pixels), alone, strict=True):
        assert [one.ids for one in found] == [one.ids for one in own]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in own], abs=1e-4)
    order = torch.tensor([4, 0, 2])
    assert [found[0].ids for found in write(pixels[order])] == [alone[i][0].ids for i in order.tolist()]


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("way", ["greedy", "beams", "nucleus", "prompt"])
def test_steps_that_a_gpu_replays_write_the_same(captioner, images, way, monkeypatch):
    write, pixels = CaptionWriter(*prepared(captioner, "float32", None, WAYS[way])), pixels_of(images, RECORD)
    right = write(pixels)
    monkeypatch.setattr(cuda_graphs, "REPLAYING", ("cpu", "cuda"))
    monkeypatch.setattr(cuda_graphs._Slot, "capture", lambda slot, decoder: None)
    write = CaptionWriter(*prepared(captioner, "float32", None, WAYS[way]))
    found = write(pixels)
    assert write.network.decoder.slots
    assert [[one.ids for one in own] for own in found] == [[one.ids for one in own] for own in right]


@pytest.mark.parametrize("kind", ["captioner-bert", "git", "coca"])
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("way", ["greedy", "beams", "prompt"])
def test_every_kind_of_captioner_is_decoded_batched_as_alone(captioner, images, kind, way):
    made, config = ALL[kind]
    text = "text" if kind == "coca" else "decoder"
    image = replace(config.image, image=(16, 16), patch=8)
    sized = replace(getattr(config, text), vocabulary=captioner.tokenizer.vocab_size)
    model = randomized(made(replace(config, image=image, **{text: sized})), 3)
    write = CaptionWriter(*prepared(replace(captioner, model=model), "auto", None, WAYS[way]))
    pixels = pixels_of(images[2:], RECORD)
    together = write(pixels)
    assert len({tuple(found[0].ids) for found in together}) > 1
    for found, one in zip(together, pixels, strict=True):
        (own,) = write(one[None])
        assert [a.ids for a in found] == [a.ids for a in own]
        assert [a.logprob for a in found] == pytest.approx([a.logprob for a in own], abs=1e-4)
        assert found[0].text.startswith(WAYS[way].get("prompt", ""))


@thin(2, pytest.mark.slow, pytest.mark.ci)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_caption_says_of_itself(captioner, images, way):
    options = WAYS[way]
    checkpoint, chosen = prepared(captioner, "float32", None, options)
    write = CaptionWriter(checkpoint, chosen)
    tokenizer, prompt = captioner.tokenizer, write.prompt
    rows = caption(images[:2], captioner, **options)
    for image, row in zip(images[:2], rows, strict=True):
        (found,) = write(pixels_of([image], RECORD))
        assert [one.text for one in found] == [one["caption"] for one in row.get("captions", [row])]
        # the last bits of a batch of one differ where several threads compute
        for name, value in found[0].record().items():
            assert row[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
        for one in found:
            assert one.finished == (len(one.ids) < min(40, CONTEXT - len(prompt)))
            assert one.tokens == len(one.ids) + one.finished
            assert one.score == pytest.approx(one.logprob / one.tokens ** options.get("length_penalty", 1.0))
            assert one.text.startswith(options.get("prompt", ""))
            assert len(one.ids) >= options.get("min_tokens", 0)
            assert tokenizer.eos_id not in one.ids
            if size := options.get("no_repeat_ngram"):
                whole = prompt + one.ids
                grams = [tuple(whole[i : i + size]) for i in range(len(whole) - size + 1)]
                assert len(set(grams)) == len(grams)
        assert [one.score for one in found if one.finished] == sorted(
            (one.score for one in found if one.finished), reverse=True
        )


@pytest.mark.ci
def test_logprob_is_the_models_own_whatever_was_narrowed(captioner, images):
    for options in ({}, {"beam_size": 3}, {"top_p": 0.5, "seed": 1}):
        row = caption(images[0], captioner, compute_type="float32", **options)[0]
        write = CaptionWriter(*prepared(captioner, "float32", None, options))
        ids = write(pixels_of(images[:1], RECORD))[0][0].ids
        full = [captioner.tokenizer.bos_id, *ids, *[captioner.tokenizer.eos_id] * row["finished"]]
        with torch.no_grad():
            logits = captioner.model(pixels_of(images[:1], RECORD), torch.tensor([full[:-1]]))[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(full[1:])[:, None]).sum().item()
        assert row["logprob"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.ci
def test_draws_follow_the_seed_and_equal_texts_are_one(captioner, images):
    drawn = [caption(images[2], captioner, temperature=0.3, num_captions=30, seed=seed)[0] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    texts = [one["caption"] for one in drawn[0]["captions"]]
    assert len(set(texts)) == len(texts) < 30
    assert sum(one["count"] for one in drawn[0]["captions"]) == 30
    assert len(caption(images[2], captioner, top_k=1, num_captions=30)[0]["captions"]) == 1
    assert caption(images[2], captioner, top_k=1)[0]["caption"] == caption(images[2], captioner)[0]["caption"]


def test_a_cut_caption_is_flagged(captioner, images):
    whole = caption(images[2], captioner, min_tokens=6)[0]
    cut = caption(images[2], captioner, max_new_tokens=5, min_tokens=5)[0]
    assert (whole["finished"], cut["finished"], cut["tokens"]) == (True, False, 5)
    with pytest.warns(UserWarning, match="max_new_tokens 99: limited to 19 by the context"):
        caption(images[2], captioner, max_new_tokens=99)


def test_typed_control_tokens_stay_text(captioner):
    tokenizer = captioner.tokenizer
    for control in (tokenizer.bos_id, tokenizer.eos_id):
        spelled = tokenizer.decode([control], skip_control=False)
        write = CaptionWriter(captioner, CaptionOptions(prompt=spelled))
        assert len(spelled) > 1
        assert control not in write.prompt[1:]
        assert tokenizer.decode(write.prompt) == spelled


@pytest.mark.ci
def test_an_empty_caption_is_said_and_broken_logits_are_refused(images):
    ends = written(end=60.0)
    with pytest.warns(UserWarning, match="the caption is empty"):
        (row,) = caption(images[0], ends)
    assert (row["caption"], row["tokens"], row["finished"]) == ("", 1, True)
    mute = written(end=-60.0)
    few = replace(mute, tokenizer=mute.tokenizer)
    with torch.no_grad():
        few.model.decoder.head.weight[4:] = math.nan  # a vocabulary of four
    for options in ({}, {"beam_size": 3}, {"temperature": 1.0}):
        with pytest.raises(CheckpointError, match="logits that are not finite"):
            caption(images[0], few, **options)


@pytest.mark.parametrize("options", [{}, {"beam_size": 2}, {"temperature": 1.0}])
def test_a_caption_cut_short_by_the_options_gets_a_warning(monkeypatch, captioner, images, options):
    never = CaptionWriter._processors

    def all_but_few(self, eos):
        rule, end = never(self, eos)[:-1], never(self, eos)[-1]

        def few(ids, logits):
            logits[:, :-6] = -math.inf
            return logits

        return [*rule, few, end]

    monkeypatch.setattr(CaptionWriter, "_processors", all_but_few)
    with pytest.warns(UserWarning, match="under min_tokens 12: the options forbid every other token"):
        (row,) = caption(images[0], captioner, no_repeat_ngram=1, min_tokens=12, **options)
    assert row["finished"]
    assert math.isfinite(row["score"])


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"beams": 3}, "option 'beams': unknown"),
        ({"beam_size": 0}, r"beam_size must be an integer in \[1, 1000\] \(got 0\)"),
        ({"num_captions": 2.5}, "num_captions must be an integer"),
        ({"top_p": 0}, r"top_p must be a number in \(0, 1\] \(got 0\)"),
        ({"top_p": math.nan}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e-30}, "too near 0"),
        ({"temperature": 0.0, "top_k": 3}, "top_k 3 is for sampling"),
        ({"temperature": 1.0, "beam_size": 3}, "beam_size 3 searches"),
        ({"num_captions": 3}, "needs a beam_size"),
        ({"num_captions": 3, "beam_size": 2}, "needs a beam_size"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9 is above max_new_tokens"),
        ({"min_tokens": 30}, "min_tokens must be at most 19"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"prompt": 3}, "prompt must be a string"),
        ({"compute_type": "int3"}, "compute_type must be one of"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_options_that_cannot_be_used_are_refused_in_one_line(captioner, images, options, cause):
    with pytest.raises(UsageError, match=cause) as error:
        caption(images[0], captioner, **options)
    assert "\n" not in str(error.value)


def test_a_prompt_that_leaves_no_room_is_refused(captioner, images):
    with pytest.raises(TextError, match="the model's context is 20"):
        caption(images[0], captioner, prompt="xyz " * 20)
    assert caption(images[0], captioner, prompt="a red wall")[0]["caption"].startswith("a red wall")


def test_the_cards_options_hold_until_others_are_asked_for(captioner, images):
    card = {"caption": {"beam_size": 3, "no_repeat_ngram": 2, "prompt": "a"}}
    own = replace(captioner, card=card)
    assert caption(images[0], own) == caption(images[0], captioner, **card["caption"])
    assert options_for(own, {"beam_size": 2}) == CaptionOptions(beam_size=2, no_repeat_ngram=2, prompt="a")
    drawn = options_for(own, {"top_p": 0.9, "num_captions": 4})  # no beam then
    assert (drawn.beam_size, drawn.temperature, drawn.no_repeat_ngram) == (1, 1.0, 2)
    draws = replace(captioner, card={"caption": {"temperature": 0.7, "top_k": 5}})
    assert options_for(draws, {}).temperature == 0.7
    assert options_for(draws, {"beam_size": 4}) == CaptionOptions(beam_size=4)
    for wrong, cause in [({"beam": 3}, "unknown"), ({"beam_size": "3"}, "integer"),
                         ({"num_captions": 2}, "needs a beam_size")]:  # fmt: skip
        with pytest.raises(CheckpointError, match=f"tiny: card, caption: .*{cause}"):
            caption(images[0], replace(captioner, card={"caption": wrong}))


@pytest.mark.ci
def test_broken_images_stand_in_their_place_and_the_others_are_done(captioner, images, tmp_path: Path):
    names = []
    for number, image in enumerate(images[:5]):
        names.append(tmp_path / f"{number}.png")
        image.save(names[-1])
    names[2].write_bytes(names[2].read_bytes()[:40])
    found = dict(caption_many(names, captioner, batch_size=2))
    assert set(found) == set(names)
    assert isinstance(found[names[2]], ImageError)
    good = [name for name in names if name != names[2]]
    assert [found[name]["caption"] for name in good] == [row["caption"] for row in caption(good, captioner)]
    with pytest.raises(ImageError, match=r"2\.png"):
        caption(names, captioner)


def test_a_model_that_cannot_caption_is_refused(captioner, images):
    for part in ("tokenizer", "preprocessing"):
        with pytest.raises(CheckpointError, match=f"has no {part}|{part} is needed"):
            caption(images[0], replace(captioner, **{part: None}))
    with pytest.raises(MultimodalError, match="expected a captioner"):
        caption(images[0], Checkpoint(captioner.model.image, captioner.tokenizer, RECORD))
