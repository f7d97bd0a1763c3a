"""Options of generated text and of translation."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from multimodal.data.cleaning.options import CleanOptions
from multimodal.decoding.options import DecodingOptions, check_combination, with_temperature
from multimodal.errors import UsageError
from multimodal.inference.options import BatchOptions
from multimodal.system.options import OptionSet, option

ON_LONG = ("error", "cut")


def _stops(value: Any) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for text in texts:
        if not isinstance(text, str) or not text or text != text.encode(errors="ignore").decode():
            raise UsageError(f"must be strings of UTF-8 that are not empty (got {text!r:.40})")
    return texts


class GenerateOptions(DecodingOptions):
    """`num_return`: that many of the beam, the best first, or that many samples. `stop`: a text ends before any of
    these. `on_long`: a prompt beyond the context is an "error" (where the model cannot compute it), or "cut" from the
    left."""

    min_p: float = option(0.0, "sample from the tokens with at least this share of the highest probability "
                          "(default: 0)", "P", low=0, high=1)  # fmt: skip
    early_stopping: bool = option(False, "end a beam search after its first beam_size endings, as in transformers")
    num_return: int = option(1, "the N best of the beam, or N samples", "N", low=1, high=1000)
    batch_size: int = option(8, "prompts per batch", "N", low=1)
    stop: tuple[str, ...] = option((), "end a text before any of these", "TEXT", read=_stops)
    on_long: str = option("error", "refuse a prompt beyond the context, or cut it from the left (a model without a "
                          "table of positions, such as Llama, reads on with a warning)", choices=ON_LONG)  # fmt: skip


Chosen = TypeVar("Chosen", bound=GenerateOptions)


def options_for(given: Mapping[str, Any], kind: type[Chosen] = GenerateOptions) -> Chosen:
    """Raises UsageError for an unknown name, a bad value or values that contradict each other."""
    options = with_temperature(kind(**given), given)
    check_combination(options, "num_return")
    return options


class PromptOptions(GenerateOptions):
    """`chat`: a prompt is a user's message, which the model's chat template renders, after a `system` message if one is
    given."""

    chat: bool = option(False, "answer each prompt as a chat message, using the model's chat template")
    system: str | None = option(None, "instructions before the message (with --chat)", "TEXT")


def prompt_options(given: Mapping[str, Any]) -> PromptOptions:
    """Raises UsageError as `options_for` does, and for a system message without a chat."""
    options = options_for(given, PromptOptions)
    if options.system is not None and not options.chat:
        raise UsageError("is for a chat", argument="system")
    return options


class TranslateOptions(OptionSet):
    """`max_new_tokens` None: twice the source's tokens and 50, as far as the model's context goes. `batch_size`: texts
    side by side. `on_long`: a text beyond the context is "cut", or an "error"."""

    beam_size: int = DecodingOptions.beam_size.but(5)
    length_penalty: float = DecodingOptions.length_penalty
    early_stopping: bool = GenerateOptions.early_stopping
    repetition_penalty: float = DecodingOptions.repetition_penalty
    no_repeat_ngram: int = DecodingOptions.no_repeat_ngram
    max_new_tokens: int | None = option(
        None, "cut a translation after N tokens (default: twice the source's plus 50)", "N", low=1, also=("max_tokens",)
    )
    batch_size: int = BatchOptions.batch_size
    on_long: str = option("cut", "cut a text beyond the model's context, with a warning, or refuse it",
                          choices=("cut", "error"))  # fmt: skip


class EmbedOptions(OptionSet):
    """`pooling`: `mean` or `max` over all tokens including bos and eos, as in sentence-transformers; the first (`cls`)
    or `last` token; or BERT's `pooler`. None: the checkpoint card's, else `last` for a causal model (without eos) and
    `mean` for others. CLIP models have their own."""

    pooling: str | None = option(
        None, "mean, max: over all tokens, including control tokens; cls: the first token; last: the last token; "
        "pooler: BERT's, on the first token (default: the model's own, else last for a causal model, mean for others)",
        choices=("mean", "max", "cls", "last", "pooler"),
    )  # fmt: skip
    prompt: str | None = option(None, "name of the model's prompt for a task, such as query or document, to put "
                                "before each text (default: the model's own default)", "NAME")  # fmt: skip
    normalize: bool | None = option(None, "scale vectors to length 1 (default: the model's own)")
    batch_tokens: int | None = option(None, "tokens per batch (default: 1024, on a GPU 16384)", "N", low=1)


class FillMaskOptions(OptionSet):
    """`iterations`: of Mask-Predict, with a masked language model; the others are for encoder-decoders."""

    top_k: int = option(5, "tokens listed for each mask", "K", low=1)
    iterations: int = option(1, "fill several masks in N steps, each of which predicts the least certain ones again "
                             "(Mask-Predict)", "N", low=1, high=1000)  # fmt: skip
    beam_size: int = DecodingOptions.beam_size
    max_new_tokens: int | None = option(None, "most tokens that an encoder-decoder writes (default: twice the text's "
                                        "plus 50)", "N", low=1, also=("max_tokens",))  # fmt: skip


class TagOptions(OptionSet):
    """`merge`: `simple` groups neighbouring tokens of one label; the others first give all tokens of a word one label,
    that of its first token, of its mean probabilities or of its most certain token (transformers'
    `aggregation_strategy`)."""

    merge: str = option("simple", "how tokens become entities: neighbours with one label (simple), or words with the "
                        "label of their first token, their mean or their most certain token",
                        choices=("simple", "first", "average", "max"))  # fmt: skip
    overlap: int = option(64, "tokens that neighbouring windows of a long text share", "N", low=0)


class AnswerOptions(OptionSet):
    """`null`: the answer may be that there is none. `window`: tokens, with the question, at most the model's
    context. transformers' question-answering pipeline has the same defaults."""

    top_k: int = option(1, "answers listed, the best first", "K", low=1)
    null: bool = option(False, "allow the empty answer, for questions without one in the context")
    max_answer_tokens: int = option(15, "longest answer in tokens", "N", low=1)
    window: int = option(384, "tokens of a window of a long context, with the question", "N", low=4)
    overlap: int = option(128, "tokens that neighbouring windows share (at most half a window)", "N", low=0)


class PerplexityOptions(OptionSet):
    """Windows of a text. `documents` None: none."""

    task: str = option(
        "perplexity", "perplexity: of the text, with bits per byte; last-word: of passages, lines or the texts of JSON "
        "lines (LAMBADA); cloze: choices for a blank, by the probability of the choice and the rest; winograd: by that "
        "of the rest alone", choices=("perplexity", "last-word", "cloze", "winograd"),
    )  # fmt: skip
    documents: str | None = CleanOptions.documents.but(
        None, help="unit of text for the perplexity. none: the file; lines: each line; blank: each part between blank "
        "lines (default: none)",
    )  # fmt: skip
    context: int | None = option(None, "context length in tokens (default: as in training)", "N", low=1)
    stride: int | None = option(None, "step of the sliding window in tokens; a smaller step gives each token more "
                                "context (default: the context; half of it for a prefix LM)", "N", low=1)  # fmt: skip
