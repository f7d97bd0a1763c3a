"""Bytes of tokens in log-probabilities, also of those that hold a part of a character."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models

from multimodal.serve.jobs.texts import token_scores
from multimodal.serve.jobs.token_bytes import spellings, token_score
from multimodal.tasks.text.detokenize import token_texts
from multimodal.tasks.text.generate import Generator
from multimodal.tokens.text.hub.pipeline import HubTokenizer
from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer
from multimodal.tokens.text.tiktokens import GPT2Tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint
from tests.helpers.references import seq2seq
from tests.helpers.spread import thin


def pieces(tmp_path, size: int = 300, text: str = "one or two") -> SentencePieceTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 9), model_writer=model, vocab_size=size, model_type="bpe",
        byte_fallback=size > 256, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    return SentencePieceTokenizer(tmp_path / "tokenizer.model", pad_id=0, vocab_size=size)


def hub(_) -> HubTokenizer:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), " ", "o", "r", "n", "e"]
    made = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return HubTokenizer(json.loads(made.to_str()), {}, len(names), 0, unknown_id=0)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("make", [pieces, hub, lambda _: GPT2Tokenizer()], ids=["pieces", "hub", "letters"])
def test_each_token_has_its_own_bytes(make, tmp_path):
    tokenizer: Tokenizer = make(tmp_path)
    text = "or € or 😀 ё"
    before, ids = tokenizer.encode("one"), tokenizer.encode(" " + text)
    spelled = spellings(tokenizer, ids, token_texts(tokenizer, before, ids))
    assert b"".join(spelled).decode().strip() == text
    parts = [i for i, one in enumerate(spelled) if "\ufffd" in one.decode(errors="replace")]
    assert len(parts) >= 4
    assert all(spelled)
    for i in parts:  # without the tokens around them
        assert spellings(tokenizer, [ids[i]], token_texts(tokenizer, [*before, *ids[:i]], [ids[i]])) == [spelled[i]]
        assert token_score(spelled[i], -1.0)["bytes"] == list(spelled[i])
    cut = [*ids[: parts[0] + 1], *tokenizer.encode(" or")]  # a character that is left incomplete
    found = spellings(tokenizer, cut, token_texts(tokenizer, before, cut))
    assert found[: parts[0] + 1] == spelled[: parts[0] + 1]
    assert b"".join(found[parts[0] + 1 :]).decode().strip() == "or"


def test_tokens_of_an_answer_to_a_source_are_its_text(tmp_path):
    """It follows no prompt, so its first token has no blank."""
    made = seq2seq.case("Hugging Face T5")
    tokenizer = pieces(tmp_path, 60, "the quick brown fox jumps over the lazy dogs")
    model = made.family.load(made.tensors, made.config, "file").model
    writer = Generator(Checkpoint(model, tokenizer), max_new_tokens=6, stop=["zz"]).writer
    for text in ("the fox", "dogs"):
        ids = writer.ids(text)
        ((answer,),) = writer([ids])
        scores = token_scores(writer, ids, answer, 2)
        assert "".join(one["token"] for one in scores) == answer.text != ""
        assert sum(one["logprob"] for one in scores) == pytest.approx(answer.logprob, rel=1e-4)


def test_a_part_of_a_character_is_escaped_in_the_token():
    assert token_score(b" \xe2\x82", -1.0) == {"token": " \\xe2\\x82", "logprob": -1.0, "bytes": [32, 226, 130]}
