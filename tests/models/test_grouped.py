"""Language-specific feed-forwards of translators (M2M-100's sparse layers)."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from multimodal import load, translate
from multimodal.blocks.stack import StackConfig
from multimodal.errors import CheckpointError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.tasks.inspect.cost import counts
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train.objectives.text.translation import CollatePairs, ParallelTexts, Translating, translator
from multimodal.weights.convert import convert
from multimodal.weights.folder import Checkpoint, save_folder

TEXTS = {
    "en": ["a dog runs", "a cat sleeps", "two dogs run", "the man eats"],
    "de": ["ein Hund rennt", "eine Katze schläft", "zwei Hunde rennen", "der Mann isst"],
    "fr": ["un chien court", "un chat dort", "deux chiens courent", "l'homme mange"],
}
GROUPS = (("en", "de"), ("fr",))
PAIRS = [("en", "fr"), ("de", "en"), ("fr", "de")]


@pytest.fixture(scope="module")
def made() -> Checkpoint:
    tokenizer = BytePairTokenizer.train([line for rows in TEXTS.values() for line in rows], 300, languages=[*TEXTS])
    torch.manual_seed(1)
    model = translator(tokenizer, 16, (2, 2), 2, 32, 24, 0.0, GROUPS, (1, 2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return Checkpoint(model, tokenizer)


def dense(model: EncoderDecoder, source: int, target: int) -> EncoderDecoder:
    """A model without groups whose feed-forwards are those of these groups."""
    plain = lambda config: replace(config, languages=(), stack=replace(config.stack, groups=0, grouped=0))
    config = model.config
    other = EncoderDecoder(EncoderDecoderConfig(plain(config.encoder), plain(config.decoder), config.start_id))
    groups = {"encoder": f".feeds.{source}.", "decoder": f".feeds.{target}."}
    weights = {}
    for name, value in model.state_dict().items():
        if ".feeds." not in name:
            weights[name] = value
        elif (own := groups[name.split(".")[0]]) in name:
            weights[name.replace(own, ".")] = value
    other.load_state_dict(weights)
    return other.eval()


@pytest.mark.ci
def test_a_row_costs_as_much_as_without_groups(made):
    found, plain = counts(made.model, 12), counts(dense(made.model, 0, 1), 12)
    assert found["flops"] == plain["flops"]
    assert found["training_bytes"]["weights"] == 4 * sum(p.numel() for p in made.model.parameters())


@torch.no_grad()
def test_each_row_uses_its_languages_layers(made):
    source = ParallelTexts(TEXTS, made.tokenizer, PAIRS, made.model.config.start_id, 24)
    keys = [("en", "fr", 0), ("fr", "de", 1), ("de", "en", 2), ("fr", "de", 3)]
    batch = CollatePairs(made.tokenizer.pad_id)([source.read(key) for key in keys])
    found = made.model(batch.source.ids, batch.answer.ids, batch.source.valid, batch.answer.valid)
    group = {name: number for number, names in enumerate(GROUPS) for name in names}
    for row, (a, b, line) in zip(found, keys, strict=True):
        pair = source.read((a, b, line))
        alone = dense(made.model, group[a], group[b])(torch.tensor([pair.source]), torch.tensor([pair.answer]))[0]
        assert_close(row[: len(alone)], alone, atol=1e-5, rtol=0)
    other = dense(made.model, 0, 0)(torch.tensor([pair.source]), torch.tensor([pair.answer]))[0]
    assert (other - alone).abs().max() > 0.01


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::multimodal.tokens.text.tokenizer.TextCut")
@pytest.mark.parametrize("beams", [1, 3])
def test_translations_are_those_of_the_dense_model(made, tmp_path, beams):
    save_folder(made, tmp_path / "grouped")
    again = load(tmp_path / "grouped")
    assert again.model.config == made.model.config
    prepared = prepare_for_inference(again)
    every = set()
    for a, b in PAIRS:
        group = {name: number for number, names in enumerate(GROUPS) for name in names}
        plain = Checkpoint(dense(made.model, group[a], group[b]), made.tokenizer)
        options = {"beam_size": beams, "max_new_tokens": 8, "compute_type": "float32"}
        expected = translate(TEXTS[a], plain, a, b, **options)
        assert translate(TEXTS[a], prepared, a, b, beam_size=beams, max_new_tokens=8) == expected
        every |= set(expected)
    assert len(every) > 3


def test_every_groups_layers_learn(made):
    source = ParallelTexts(TEXTS, made.tokenizer, PAIRS, made.model.config.start_id, 24)
    batch = CollatePairs(made.tokenizer.pad_id)([source.read(key) for key in source.keys])
    made.model.requires_grad_(True)
    Translating(made.model)(batch)["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.model.parameters())
    made.model.zero_grad()


def test_what_cannot_be_is_refused(made, tmp_path):
    model = made.model
    with pytest.raises(ValueError, match="a row has no language token"):
        model.encode(torch.tensor([[5, 6, 2], [made.tokenizer.language_ids["en"], 5, 2]]))
    stack = model.config.encoder.stack
    with pytest.raises(ValueError, match="groups 2 of 0 blocks"):
        replace(stack, grouped=0)
    with pytest.raises(ValueError, match=r"grouped: must be 0 to 2, the number of layers \(got 3\)"):
        replace(stack, grouped=3)
    with pytest.raises(ValueError, match="languages: has 1 groups, the stack's blocks 2"):
        replace(model.config.encoder, languages=((1,),))
    assert StackConfig(stack.block, 1).groups == 0
    assert not any(isinstance(x, nn.ModuleList) and not len(x) for x in model.modules())
    save_folder(made, tmp_path / "grouped")
    with pytest.raises(CheckpointError, match=r"feeds\.0\.up\.weight.* has no row"):
        convert(tmp_path / "grouped", tmp_path / "m.safetensors", to="m2m100")
