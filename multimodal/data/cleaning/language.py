"""Language of a page, by py3langid (97 languages)."""

from functools import cache
from typing import TYPE_CHECKING

from multimodal.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

LETTERS = 2000  # of a page that are read


@cache
def _identifier() -> "LanguageIdentifier":
    from py3langid import langid  # takes a second

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


class LanguageRule:
    """Pages in `language` with at least `probability`. Raises UsageError for an unknown language."""

    def __init__(self, language: str, probability: float):
        self.language, self.probability, self._identifier = language, probability, _identifier()
        if language not in (known := sorted(map(str, self._identifier.labels))):
            raise UsageError(
                f"unknown ({language[:40]!r}{did_you_mean(language, known)}; known: {', '.join(known)})",
                argument="language",
            )

    def __call__(self, text: str) -> bool:
        language, probability = self._identifier.classify(text[:LETTERS])
        return language == self.language and probability >= self.probability
