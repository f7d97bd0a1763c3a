"""Scores of captions against several references: BLEU-4 and CIDEr by pycocoevalcap, without its Java programs.

pycocoevalcap tokenises with Stanford's PTBTokenizer, a Java program, whose place a rule takes here (`words`). Its Bleu
and Cider classes are pure Python and take texts of words set apart by spaces.
"""

import re
from collections.abc import Sequence
from typing import Any

from multimodal.errors import DataError

CLITIC = re.compile(r"(n't|'(?:s|re|ve|ll|m|d))\b")
WORD = re.compile(r"n't|'(?:s|re|ve|ll|m|d)\b|\w+(?:[-./]\w+)*|[&$%#@*+=/]")


def words(text: str) -> str:
    """Lower case, words set apart by spaces, "man's" as "man 's", without the punctuation that coco-caption leaves
    out; hyphened words stay whole, as PTBTokenizer leaves them."""
    return " ".join(WORD.findall(CLITIC.sub(r" \1", text.lower().replace("’", "'"))))


def caption_scores(captions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """`bleu4` in % (Papineni et al. 2002, corpus level, closest reference length) and `cider` in % (CIDEr-D of
    Vedantam et al. 2015, document frequencies of these references; 100 for a score of 1), as coco-caption gives them.

    Raises DataError where there are fewer than two pictures or a picture has no reference."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider

    if len(captions) != len(references) or len(captions) < 2:
        raise DataError(f"captions to score: {len(captions)} for {len(references)} pictures, two or more are needed")
    if bare := [i for i, own in enumerate(references) if not any(words(text) for text in own)]:
        raise DataError(f"captions to score: picture {bare[0]} has no reference")
    given = {i: [words(text)] for i, text in enumerate(captions)}
    wanted = {i: [words(text) for text in own] for i, own in enumerate(references)}
    bleu, _ = Bleu(4).compute_score(wanted, given, verbose=0)
    cider, _ = Cider().compute_score(wanted, given)
    return {"bleu4": 100 * float(bleu[3]), "cider": 100 * float(cider)}


def agreement(references: Sequence[Sequence[str]]) -> dict[str, float]:
    """How one person's captions score against the others': each reference in turn, the mean. As many turns as the
    picture with the fewest references has; each picture is scored against all its others."""
    turns = min(len(own) for own in references)
    if turns < 2:
        raise DataError("agreement: a picture has one reference only")
    found = [
        caption_scores([own[i] for own in references], [[*own[:i], *own[i + 1 :]] for own in references])
        for i in range(turns)
    ]
    return {name: sum(row[name] for row in found) / turns for name in found[0]}


def best_constant(candidates: Sequence[str], references: Sequence[Sequence[str]], most: int = 100) -> dict[str, Any]:
    """The caption that does best when every picture is given the same: its CIDEr, BLEU-4 and `text`. Of the candidates
    the `most` whose words are most like those of the references (Jaccard index, the mean) are scored."""
    bags = [set(words(text).split()) for own in references for text in own]
    own = [(set(words(text).split()), text) for text in dict.fromkeys(candidates)]
    near = sorted(own, key=lambda pair: -sum(len(pair[0] & bag) / len(pair[0] | bag) for bag in bags if bag))[:most]
    found = [caption_scores([text] * len(references), references) | {"text": text} for _, text in near]
    return max(found, key=lambda row: row["cider"])
