"""A small WordPiece vocabulary."""

import string

LETTERS = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase if letter != "s")]


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog", "##s", "sea", "at", ".", "<", ">", "mask", "[",
         "]", *LETTERS]  # fmt: skip


SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}


def wordpiece(vocab: list[str]) -> object:
    from transformers import BertTokenizer

    return BertTokenizer(vocab={word: i for i, word in enumerate(vocab)})
