"""Training a known model further: recipes apply dropout to it, and refuse other sizes than it has."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multimodal.data.datasets.speech_windows import Curriculum
from multimodal.errors import UsageError
from multimodal.train.lora import with_rates
from multimodal.train.objectives import captioning, coca
from multimodal.train.objectives.any_to_text_model import AnySettings
from multimodal.train.objectives.captioning import DecoderSettings
from multimodal.train.objectives.contrastive_model import ContrastiveModelSettings
from multimodal.train.objectives.text.masked import EncoderSettings
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load
from tests.helpers.spread import thin

OUT = Path("out")
TRANSLATED = {f"{side}.{place}" for side in ("encoder", "decoder")
              for place in ("stem_dropout", "stack.block.dropout", "stack.block.attention.dropout")}  # fmt: skip
ASR = {"train": (), "valid": "", "out": OUT, "init": "asr-conformer-en"}


def translator(recipes, own: dict[str, Any]) -> Checkpoint:
    return Checkpoint(*recipes("train_translation").trained(
        recipes("train_translation").TranslationRun("t", "v", OUT, init="translator-mini", **own)))  # fmt: skip


def clip(recipes, own: dict[str, Any]) -> Checkpoint:
    recipe = recipes("train_clip")
    return recipe.start_checkpoint(recipe.CLIPRun((), OUT, init="clip-vit-16", model=ContrastiveModelSettings(**own)))


def whisper(recipes, own: dict[str, Any]) -> Checkpoint:
    recipe = recipes("train_whisper")
    run = recipe.WhisperRun((), (), OUT, init="whisper-mini", curriculum=Curriculum(600), **own)
    return recipe.begin(run, SimpleNamespace(clips=[]))


def embedder(recipes, own: dict[str, Any]) -> Checkpoint:
    recipe = recipes("train_embedder")
    sizes = replace(recipe.EmbedderRun.encoder, **own)
    return recipe.begin(recipe.EmbedderRun("t", "v", OUT, init="sentence-mini", encoder=sizes), {})


def any_to_text(recipes, own: dict[str, Any]) -> Checkpoint:
    recipe = recipes("train_any")
    return recipe.initial(recipe.AnyRun((), OUT, init="any-mini", model=AnySettings(**own)), [])


def recognizer(recipes, own: dict[str, Any]) -> Checkpoint:
    recipe = recipes("train_asr")
    return recipe.begin(recipe.RecognizerRun(**ASR, model=recipe.RecognizerModelSettings(**own)), [])


def captioner(recipes, own: dict[str, Any]) -> Checkpoint:
    return captioning.begin(load("captioner-mini"), [], 300, DecoderSettings(**own))


def new_coca() -> Checkpoint:
    torch.manual_seed(0)
    return coca.begin(load("clip-vit-16"), DecoderSettings(layers=1))


def coca_again(recipes, own: dict[str, Any]) -> Checkpoint:
    return coca.begin(new_coca(), DecoderSettings(**own))


CASES = [
    (translator, "translator-mini", {"dropout": 0.3}, TRANSLATED | {"decoder.stack.block.cross.dropout"}),
    (clip, "clip-vit-16", {"drop_path": 0.3}, {"image.stack.drop_path"}),
    (whisper, "whisper-mini", {"dropout": 0.3}, {"encoder.stack.block.dropout", "decoder.stack.block.dropout"}),
    (embedder, "sentence-mini", {"dropout": 0.3}, {"stem_dropout", "stack.block.dropout"}),
    (any_to_text, "any-mini", {"dropout": 0.3}, {"decoder.stack.block.dropout"}),
    (recognizer, "asr-conformer-en", {"drop_path": 0.3}, {"encoder.drop_path"}),
    (captioner, "captioner-mini", {"dropout": 0.3, "drop_path": 0.3},
     {"decoder.stack.block.dropout", "image.stack.drop_path"}),
    (coca_again, None, {"dropout": 0.3, "drop_path": 0.3},
     {"text.stack.block.dropout", "decoder.block.dropout", "image.stack.drop_path"}),
]  # fmt: skip


def changes(config: Any, other: Any, place: str = "") -> dict[str, Any]:
    """Values of the other config where it differs, by place."""
    if not is_dataclass(config):
        return {place: other} if config != other else {}
    found = (changes(getattr(config, f.name), getattr(other, f.name), f"{place}.{f.name}".lstrip("."))
             for f in fields(config))  # fmt: skip
    return {place: value for part in found for place, value in part.items()}


@pytest.mark.ci
@pytest.mark.parametrize(("begin", "name", "rates", "places"), CASES)
def test_dropout_is_that_of_the_flag_or_the_models_own(load_recipe, begin, name, rates, places):
    known, own, made = load(name) if name else new_coca(), begin(load_recipe, {}), begin(load_recipe, rates)
    assert own.model.config == known.model.config
    assert changes(known.model.config, made.model.config) == dict.fromkeys(places, 0.3)
    assert {m.p for m in made.model.modules() if isinstance(m, torch.nn.Dropout)} - {0.0} <= {0.3, 0.05}
    ours = made.model.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in known.model.state_dict().items())


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize(("begin", "size"), [
    (translator, {"width": 64}), (translator, {"grouped": (0, 1), "groups": ("en,de", "fr,cs")}),
    (clip, {"layers": 12}),
    (clip, {"text_width": 64}), (whisper, {"hidden": 2}), (embedder, {"width": 64}), (any_to_text, {"layers": 2}),
    (any_to_text, {"image_layers": 1}), (recognizer, {"decoder_layers": 1}), (captioner, {"encoder_layers": 2}),
    (coca_again, {"queries": 4}),
])  # fmt: skip
def test_other_sizes_than_the_models_are_refused(load_recipe, begin, size):
    with pytest.raises(UsageError, match=rf"^{next(iter(size))} .* has .*, which it keeps"):
        begin(load_recipe, size)


def test_rates_are_shares(load_recipe):
    with pytest.raises(UsageError, match=r"drop_path must be 0 to under 1"):
        with_rates(load("clip-vit-16").model, {"image.stack.drop_path": 1.0})


def test_words_grow_with_the_dropout_of_the_flag(load_recipe):
    made = embedder(load_recipe, {"layers": 1, "dropout": 0.3}).model
    assert (made.config.stack.layers, made.config.stack.block.dropout, made.config.stem_dropout) == (1, 0.3, 0.3)
    assert EncoderSettings(dropout=None).stack().block.dropout == 0
