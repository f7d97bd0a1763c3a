"""Spans filled by BART and T5, equal to transformers' generate, and Mask-Predict beside a written-out loop."""

import json

import pytest
import torch

from multimodal.errors import TextError, UsageError
from multimodal.tasks.text.fill_mask import fill_mask
from multimodal.weights.load import load
from tests.helpers.commands import one_line, run
from tests.helpers.data.wordpieces import SIZES, WORDS, wordpiece
from tests.helpers.references.vision import randomized
from tests.helpers.spread import thin
from tests.tasks.text.test_fill_mask import byte_level

BART_TEXTS = ["the dog <mask> the dog", "<mask> the dog", "the <mask>, the <mask>."]
T5_TEXTS = ["the <extra_id_0> sat at <extra_id_1> sea", "<extra_id_0> dog"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`bart`, `t5` and `bert` with their tokenizers, as transformers writes them."""
    import transformers

    root = tmp_path_factory.mktemp("spans")
    torch.manual_seed(1)
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}  # fmt: skip
    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁dog", "▁sea", "▁at", "s", *"abcdefghijklmnopqrtuvwxyz"]
    t5 = transformers.T5Tokenizer(vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=5)
    tokenizers = {"bart": byte_level(), "t5": t5, "bert": wordpiece(WORDS)}
    models = {
        "bart": transformers.BartForConditionalGeneration(transformers.BartConfig(
            vocab_size=len(tokenizers["bart"]), max_position_embeddings=64, **sizes)),
        "t5": transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=len(t5), d_model=24, d_kv=12, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, vocab_size=len(WORDS))),
    }  # fmt: skip
    for name, model in models.items():
        randomized(model).save_pretrained(root / name)
        tokenizers[name].save_pretrained(root / name)
    return root


def generated(folder, text: str, **options) -> list[int]:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    row = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    made = model.generate(row["input_ids"], attention_mask=row["attention_mask"], do_sample=False, **options)
    return made[0].tolist()


@pytest.mark.ci
@pytest.mark.parametrize(("given", "asked"), [
    ({"beam_size": 1}, {}), ({"beam_size": 3}, {}),
    ({}, {"num_beams": 3, "no_repeat_ngram_size": 2}),  # by generation_config.json
])  # fmt: skip
def test_bart_writes_the_whole_text_as_generate_does(folders, given, asked):
    from transformers import AutoTokenizer

    checkpoint, tokenizer = load(folders / "bart"), AutoTokenizer.from_pretrained(folders / "bart")
    checkpoint.card["generation"] |= asked
    for text, mine in zip(BART_TEXTS, fill_mask(BART_TEXTS, checkpoint, max_new_tokens=12, **given), strict=True):
        options = {"num_beams": given.get("beam_size"), "max_new_tokens": 12, "forced_bos_token_id": 0} | asked
        theirs = generated(folders / "bart", text, **options)
        assert mine["filled"] == tokenizer.decode(theirs, skip_special_tokens=True).strip()
        assert mine["filled"]
        assert mine["score"] < 0


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("beams", [1, 3])
def test_t5_fills_its_sentinels_as_generate_does(folders, beams):
    checkpoint = load(folders / "t5")
    tokenizer, marks = checkpoint.tokenizer, checkpoint.tokenizer.sentinel_ids
    assert len(marks) == 5
    with torch.no_grad():  # a random model writes no sentinel by itself
        checkpoint.model.decoder.embed.weight[list(marks)] *= 1.5
    from transformers import AutoModelForSeq2SeqLM

    reference = AutoModelForSeq2SeqLM.from_pretrained(folders / "t5").eval()
    with torch.no_grad():
        reference.shared.weight[list(marks)] *= 1.5
    for text, mine in zip(T5_TEXTS, fill_mask(T5_TEXTS, checkpoint, beam_size=beams, max_new_tokens=10), strict=True):
        ids = [marks[int(part[10])] if part.startswith("<extra") else i for part in text.split()
               for i in ([0] if part.startswith("<extra") else tokenizer.encode(part))]  # fmt: skip
        made = reference.generate(torch.tensor([[*ids, 1]]), num_beams=beams, do_sample=False, max_new_tokens=10)
        spans: dict[int, list[int]] = {}
        current: list[int] = []
        for i in made[0, 1:].tolist():
            if i in marks:
                current = spans.setdefault(marks.index(i), [])
            else:
                current.append(i)
        wanted = [tokenizer.decode(spans.get(number, [])).strip() for number in range(text.count("<extra"))]
        assert mine["spans"] == wanted
        filled = text
        for number, span in enumerate(wanted):
            filled = filled.replace(f"<extra_id_{number}>", span)
        assert mine["filled"] == filled


@torch.inference_mode()
def test_mask_predict_equals_its_steps_written_out(folders):
    from transformers import AutoModelForMaskedLM

    checkpoint, model = load(folders / "bert"), AutoModelForMaskedLM.from_pretrained(folders / "bert").eval()
    text, total = "the dog [MASK] [MASK] [MASK] sea [MASK] [MASK]", 4
    tokenizer = checkpoint.tokenizer
    ids = [tokenizer.bos_id, *tokenizer.encode("the dog"), *[tokenizer.mask_id] * 3, *tokenizer.encode("sea"),
           *[tokenizer.mask_id] * 2, tokenizer.eos_id]  # fmt: skip
    places = [at for at, i in enumerate(ids) if i == tokenizer.mask_id]
    chance = dict.fromkeys(places, 0.0)
    for step in range(total):
        again = sorted(places, key=chance.__getitem__)[: len(places) * (total - step) // total]
        for at in again:
            ids[at] = tokenizer.mask_id
        found = model(torch.tensor([ids])).logits[0].softmax(-1)
        for at in again:
            chance[at], ids[at] = float(found[at].max()), int(found[at].argmax())
    (mine,) = fill_mask([text], checkpoint, 2, iterations=total)
    assert [guesses[0]["id"] for guesses in mine["masks"]] == [ids[at] for at in places]
    assert [guesses[0]["probability"] for guesses in mine["masks"]] == pytest.approx(list(chance.values()), abs=1e-5)
    (alone,) = fill_mask(["the [MASK]"], checkpoint, iterations=3)
    assert alone["filled"] == fill_mask(["the [MASK]"], checkpoint)[0]["filled"]


def test_command(capsys, folders):
    code, out, err = run(capsys, "fill-mask", BART_TEXTS[0], "-m", folders / "bart", "--beam_size", 2,
                         "--max_new_tokens", 8, "--format", "json")  # fmt: skip
    assert (code, err) == (0, "")
    assert json.loads(out)[0]["filled"]
    code, out, _ = run(
        capsys, "fill-mask", "the [MASK] [MASK]", "-m", folders / "bert", "--iterations", 2, "--top_k", 1
    )
    assert (code, len(out.splitlines())) == (0, 3)


def test_what_does_not_fit_is_refused(capsys, folders):
    bart, t5, bert = (load(folders / name) for name in ("bart", "t5", "bert"))
    for call, error, cause in (
        (lambda: fill_mask(["a dog"], bart), TextError, "has no <mask>"),
        (lambda: fill_mask(["a dog"], t5), TextError, "has no <extra_id_0>"),
        (lambda: fill_mask([" "], t5), TextError, "is empty"),
        (lambda: fill_mask(["a <extra_id_7>"], t5), TextError, "has <extra_id_7>, the vocabulary has 5 sentinels"),
        (lambda: fill_mask(["a <mask>" + "a" * 80], bart), TextError, "the model's context is 64"),
        (lambda: fill_mask(["a <mask>"], bart, iterations=2), UsageError, "iterations is for masked language models"),
        (lambda: fill_mask(["a [MASK]"], bert, beam_size=2), UsageError, "beam_size is for an encoder-decoder"),
    ):
        with pytest.raises(error, match=cause):
            call()
    code, _, err = run(capsys, "fill-mask", "a [MASK]", "-m", folders / "bert", "--max_new_tokens", 5)
    assert code == 1
    assert "--max_new_tokens is for an encoder-decoder" in one_line(err)
