"""References of tagging and answering: transformers' token classification pipeline on a folder, and its removed
question-answering pipeline over the library's own span search."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.references.encoders import randomized_once

TEXT = (
    "Angela Merkel met the students of New York University in Manhattan , and they walked quickly to Wall Street . "
    "Later the unbelievable orchestra of Vienna played in Springfield for Microsoft Corporation employees ."
)
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}


def wordpiece_folder(folder: Path, head: str, context: int = 512, labels: Sequence[str] = LABELS) -> Any:
    """Save a random BERT with WordPiece of letters and a few words; return transformers' model. `labels`: of tokens."""
    import transformers

    letters = [chr(i) for i in range(97, 123)]
    words = [
        "the",
        "angel",
        "##a",
        "new",
        "york",
        "vienna",
        "walk",
        "##ed",
        "micro",
        "##soft",
        "wall",
        "street",
        ",",
        ".",
    ]
    inner = [f"##{letter}" for letter in letters if letter != "a"]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters[:-1], *words, *inner]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocab))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=context)
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocab), max_position_embeddings=context, **SIZES,
        **_labels(head, labels),
    )  # fmt: skip
    return _saved(folder, getattr(transformers, f"BertFor{head}")(config))


def byte_folder(folder: Path, head: str, context: int = 512, segments: int = 1, prefix: bool = False) -> Any:
    """The same with RoBERTa and bytes as tokens, of which a few are merged. `segments`: embeddings of segments, of
    which its tokenizer uses one. `prefix`: a blank before the first word."""
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel

    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "r"), ("Ġ", "N"), ("Ġ", "V")]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet()), *map("".join, merges), "<mask>"]
    tokenizer = transformers.RobertaTokenizerFast(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, model_max_length=context,
        add_prefix_space=prefix,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    config = transformers.RobertaConfig(
        vocab_size=len(tokens), max_position_embeddings=context + 2, type_vocab_size=segments, pad_token_id=1, **SIZES,
        **_labels(head, LABELS),
    )  # fmt: skip
    return _saved(folder, getattr(transformers, f"RobertaFor{head}")(config))


def byte_folder_of_segments(folder: Path, head: str) -> Any:
    """`byte_folder` with RobertaConfig's default of two segments."""
    return byte_folder(folder, head, segments=2)


def byte_folder_with_prefix(folder: Path, head: str) -> Any:
    return byte_folder(folder, head, prefix=True)


def _labels(head: str, labels: Sequence[str]) -> dict[str, Any]:
    if head != "TokenClassification":
        return {}
    return {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}


def _saved(folder: Path, model: Any) -> Any:
    torch.manual_seed(3)
    randomized_once(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith(("classifier", "qa_outputs")):
                weight.mul_(3)  # labels that differ between tokens
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def answers(folder: Path, model: Any, question: str, context: str, length: int, overlap: int, most: int, top_k: int,
            null: bool) -> list[tuple[str, float, int, int]]:  # fmt: skip
    """Text, score, start and end of the answers (transformers 4's question_answering.py, without its padding)."""
    import transformers
    from transformers.pipelines.document_question_answering import select_starts_ends

    encode = transformers.AutoTokenizer.from_pretrained(folder)
    made = encode(question, context, truncation="only_second", max_length=length, stride=overlap,
                  return_overflowing_tokens=True)  # fmt: skip
    found: list[list[Any]] = []
    lowest = 1000000
    for row in made.encodings:
        kinds = {"token_type_ids": torch.tensor([row.type_ids])} if model.config.type_vocab_size > 1 else {}
        logits = model(torch.tensor([row.ids]), **kinds)
        outside = np.array([[sequence != 1 for sequence in row.sequence_ids]], int)
        outside[0, 0] = 0
        starts, ends, scores, lowest = select_starts_ends(
            logits.start_logits.numpy(), logits.end_logits.numpy(), outside, np.array([row.attention_mask]), lowest,
            top_k, null, most,
        )  # fmt: skip
        for start, end, score in zip(starts, ends, scores, strict=True):
            first = row.word_to_chars(row.token_to_word(int(start)), 1)[0]
            last = row.word_to_chars(row.token_to_word(int(end)), 1)[1]
            text = context[first:last]
            known = next((one for one in found if one[0].lower() == text.lower()), None)
            if known:
                known[1] += float(score)
            else:
                found.append([text, float(score), first, last])
    found += [["", lowest, 0, 0]] if null else []
    return [tuple(one) for one in sorted(found, key=lambda one: one[1], reverse=True)[:top_k]]
