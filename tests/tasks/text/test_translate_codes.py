"""Codes of languages that users write for those of NLLB and mBART, and T5's task prefixes."""

import json

import pytest
from torch import nn

from multimodal.errors import UsageError
from multimodal.tasks.text.languages import language_id, task_prefix
from multimodal.tokens.text.languages import LANGUAGES, NLLB
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.text import bart, t5


def knowing(*languages: str) -> ByteTokenizer:
    made = ByteTokenizer()
    made.language_ids = {code: 3 + i for i, code in enumerate(languages)}
    return made


def test_nllb_takes_short_codes_and_names():
    tokenizer = knowing("eng_Latn", "deu_Latn", "zho_Hans", "zho_Hant")
    for asked in ("en", "English", "eng_Latn", "EN ", "eng"):
        assert language_id(tokenizer, asked, "source") == 3
    assert language_id(tokenizer, "zh", "target") == language_id(tokenizer, "Chinese", "target") == 5
    with pytest.raises(UsageError, match="'zho': unknown to the model"):  # two scripts
        language_id(tokenizer, "zho", "target")
    assert set(NLLB) <= set(LANGUAGES)
    assert len(set(NLLB.values())) == len(NLLB) > 90


def test_mbart_takes_short_codes():
    own = knowing("en_XX", "de_DE")
    assert [language_id(own, name, "target") for name in ("en", "German", "de_DE")] == [3, 4, 4]


def test_mbart_50s_tokenizer_is_read_and_mbart_25s_is_not(tmp_path):
    for kind, made in (("MBartTokenizer", True), ("MBart50Tokenizer", False)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        (tmp_path / "tokenizer.json").write_text("{}")
        if made:
            assert bart.tokenizer(tmp_path, {"model_type": "mbart", "vocab_size": 9}) is None
        else:
            with pytest.raises(Exception, match="has no vocabulary"):
                bart.tokenizer(tmp_path, {"model_type": "mbart", "vocab_size": 9})


def test_t5_asks_with_the_words_of_its_configuration():
    tasks = {"summarization": {"prefix": "summarize: "},
             "translation_en_to_de": {"prefix": "translate English to German: ", "num_beams": 4}}  # fmt: skip
    card = t5.card(None, {"task_specific_params": tasks})
    assert card == {"translations": {"en-de": "translate English to German: "}}
    checkpoint = Checkpoint(nn.Module(), card=card)
    assert task_prefix(checkpoint, "English", "de") == "translate English to German: "
    with pytest.raises(UsageError, match="does not translate de-en"):
        task_prefix(checkpoint, "de", "en")
    with pytest.raises(UsageError, match="is required, the model knows en-de"):
        task_prefix(checkpoint, None, "de")
    assert task_prefix(Checkpoint(nn.Module()), "en", "de") is None
