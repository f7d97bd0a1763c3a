"""Scores of hypotheses against references and of predictions against labels, as shares of 1."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.tasks.text.languages import short_code
from multimodal.tokens.text.languages import UNSPACED

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU

UNSPACED_TOO = ("km", "bo")  # which Whisper's paper leaves out, where it counts letters as words (appendix C)


def normalizer(name: str, keep_marks: bool = False) -> Callable[[str], str]:
    """Whisper's `english` one, its `basic` one for all other languages, the latter with blanks between all `letters`
    (Radford et al. 2022, appendix C), or `none`.

    `keep_marks`: the basic ones keep combining marks. They drop them else, and with them the vowel signs of Brahmic
    scripts. Raises UsageError."""
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

    if keep_marks and name not in ("basic", "letters"):
        raise UsageError(f"keep_marks: is for the normalizer 'basic' or 'letters', not for {name!r}")
    known: dict[str, Callable[[], Callable[[str], str]]] = {
        "english": EnglishTextNormalizer,
        "basic": lambda: BasicTextNormalizer(preserve_marks=keep_marks),
        "letters": lambda: BasicTextNormalizer(split_letters=True, preserve_marks=keep_marks),
        "none": lambda: str,
    }
    if name not in known:
        raise UsageError(f"normalizer must be one of {', '.join(known)} (got {name!r})")
    normal = known[name]()
    return lambda text: " ".join(normal(text).split())


def normalizer_name(language: str | None, name: str | None = None, keep_marks: bool = False) -> str:
    """The normalizer of texts in a language: `name` if given, else `english` for English without `keep_marks`,
    `letters` for `UNSPACED` languages, else `basic`."""
    if name or (language == "en" and not keep_marks):
        return name or "english"
    return "letters" if language in UNSPACED else "basic"


def error_rates(
    wanted: Sequence[str], found: Sequence[str], names: Sequence[str]
) -> tuple[float, float] | tuple[None, None]:
    """Corpus-level word and character error rates (jiwer): all errors over all words or characters wanted; None where
    no word is wanted. Blanks are characters, except after the normalizer `letters`; `names`: the normalizer of each
    text."""
    import jiwer

    if not any(map(str.split, wanted)):
        return None, None
    wer = float(jiwer.wer(list(wanted), list(found)))
    characters = [[text.replace(" ", "") if name == "letters" else text for text, name in zip(part, names, strict=True)]
                  for part in (wanted, found)]  # fmt: skip
    return wer, float(jiwer.cer(*characters))


def closest(references: Sequence[str], text: str) -> str:
    """The first reference with the fewest word errors (jiwer)."""
    import jiwer

    def errors(reference: str) -> int:
        found = jiwer.process_words(reference, text)
        return found.substitutions + found.deletions + found.insertions

    return min(references, key=errors)


def word_errors(
    references: Sequence[str], hypotheses: Sequence[str], language: str | None, name: str | None = None,
    keep_marks: bool = False,
) -> dict[str, float | None]:  # fmt: skip
    """`error_rates` of normalized texts (see `normalizer_name`)."""
    name = normalizer_name(language, name, keep_marks)
    wanted, found = (list(map(normalizer(name, keep_marks), texts)) for texts in (references, hypotheses))
    rates = error_rates(wanted, found, [name] * len(wanted))
    return {kind: rate and round(rate, 4) for kind, rate in zip(("wer", "cer"), rates, strict=True)}


def bleu(
    references: Sequence[str | tuple[str, ...]], hypotheses: Sequence[str], language: str | None = None
) -> float:  # fmt: skip
    """Corpus BLEU in percent (sacrebleu's defaults: cased, exponential smoothing; Post 2018), see `bleu_tokenizer`.
    References of a hypothesis: one, or a tuple of any number."""
    several = [(one,) if isinstance(one, str) else one for one in references]
    return round(_bleu(language).corpus_score(list(hypotheses), list(zip_longest(*several))).score, 2)


def bleu_tokenizer(language: str | None) -> str:
    """Name of the tokenizer of a target language, a code or English name: sacrebleu's `zh`, `ja-mecab` and `ko-mecab`,
    `char` where the packages of the latter two are missing and for other languages without blanks between words, `13a`
    for all others."""
    return _bleu(language).tokenizer_signature


def _bleu(language: str | None) -> "BLEU":
    from sacrebleu.metrics import BLEU

    code = short_code((language or "").replace("-", "_").partition("_")[0])
    if code in (*UNSPACED, *UNSPACED_TOO) and code not in ("zh", "yue", "ja"):
        return BLEU(tokenize="char")
    try:
        return BLEU(trg_lang="zh" if code == "yue" else code)
    except RuntimeError:  # MeCab and its dictionaries are not installed
        return BLEU(tokenize="char")


def chrf(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """Corpus chrF in percent (sacrebleu's defaults: chrF2, character 6-grams; Popović 2015)."""
    import sacrebleu

    return round(sacrebleu.corpus_chrf(list(hypotheses), [list(references)]).score, 2)


def ranks(scores: Float[Tensor, "N C"], labels: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Number of other columns that score no lower than each row's label: a tie, or a score that is NaN, is
    no hit. `topk` would take either of a tie, and a model that gives all labels one score would look informed."""
    return (~(scores < scores.gather(1, labels[:, None]))).sum(1) - 1


def top_shares(scores: Float[Tensor, "N C"], labels: Int[Tensor, "N"]) -> dict[str, float]:
    """Share of rows whose label has the highest score and, among five labels or more, one of the five highest (see
    `ranks` for ties)."""
    found = ranks(scores, labels)
    return {f"top{k}": _share(found < k) for k in (1, 5) if k <= scores.shape[1]}


def _share(hits: Tensor) -> float:
    return round(hits.to(torch.float64).mean().item(), 4)
