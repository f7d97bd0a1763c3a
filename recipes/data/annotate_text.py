"""Write annotated texts made from running text: names to tag, questions about them, and continuations to choose.

    python recipes/data/annotate_text.py data/text/wikitext2/valid.txt.gz annotated

A name is a run of capitalized words inside a sentence; the texts are in lower case, so that a model must know it. A
question is a sentence without one of its names, its context that sentence with its neighbours; a choice is the true end
of a sentence among three others. Writes tagging, qa and choice.train.jsonl and .test.jsonl (the last tenth of the
paragraphs).
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from multimodal.data.datasets.documents import read_documents
from multimodal.errors import MultimodalError

LONGEST = 40  # words of a sentence
CAPITAL = re.compile(r"[A-Z][a-z]+$")


def names_in(words: list[str]) -> list[tuple[int, int]]:
    """First and last (exclusive) word of each name after the sentence's first word."""
    found: list[tuple[int, int]] = []
    for number, word in enumerate(words):
        if number and CAPITAL.match(word):
            found = [*found[:-1], (found[-1][0], number + 1)] if found and found[-1][1] == number else [
                *found, (number, number + 1)]  # fmt: skip
    return found


def rows_of(document: list[str], others: list[list[str]], dice: random.Random) -> Iterator[tuple[str, dict]]:
    """Task and row of each example of a document."""
    sentences = [[word for word in sentence.split() if word != "<unk>"] for sentence in document]
    for number, words in enumerate(sentences):
        context = " ".join(" ".join(words) for words in sentences[max(0, number - 1) : number + 2]).lower()
        if len(words) > LONGEST:
            continue
        names, lower = names_in(words), [word.lower() for word in words]
        if names:
            starts, inside = {a for a, _ in names}, {i for a, b in names for i in range(a, b)}
            tags = ["B-NAME" if i in starts else "I-NAME" if i in inside else "O" for i in range(len(words))]
            yield "tagging", {"tokens": lower, "tags": tags}
            a, b = dice.choice(names)
            before, name = " ".join(lower[:a]), " ".join(lower[a:b])
            start = context.index(" ".join(lower)) + len(before) + 1
            answers = [{"text": name, "answer_start": start}]
            question = f"{before} who or what {' '.join(lower[b:])}"
            yield "qa", {"question": question, "context": context, "answers": answers}
        if len(words) >= 12:
            ends = [" ".join(dice.choice(others)[-6:]).lower() for _ in range(3)]
            label = dice.randrange(4)
            ends.insert(label, " ".join(lower[-6:]))
            yield "choice", {"question": " ".join(lower[:-6]), "choices": ends, "label": label}


def main(source: Path, target: Path) -> None:
    dice = random.Random(0)
    try:
        documents = [document for document in read_documents(source) if len(document) > 1]
    except MultimodalError as error:
        sys.exit(f"annotate_text.py: error: {error}")
    target.mkdir(parents=True, exist_ok=True)
    held = len(documents) * 9 // 10
    for part, some in (("train", documents[:held]), ("test", documents[held:])):
        plain = [sentence.replace("<unk>", " ").split() for document in some for sentence in document]
        others = [words for words in plain if len(words) >= 12]  # of the same part: an ending may be known otherwise
        rows = [row for document in some for row in rows_of(document, others, dice)]
        for task in ("tagging", "qa", "choice"):
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for kind, row in rows if kind == task]
            (target / f"{task}.{part}.jsonl").write_text("".join(lines), encoding="utf-8")
            print(f"{task}.{part}.jsonl: {len(lines)} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="text, gzip or not")
    parser.add_argument("target", type=Path, help="folder for the rows")
    main(**vars(parser.parse_args()))
