"""Attention of an answer: over patches of images and frames, seconds of sound, and text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.blocks.capture import capture_attention
from multimodal.errors import UsageError
from multimodal.inference.modules import inference_mode
from multimodal.tasks.ask.asker import Asker
from multimodal.tasks.ask.writer import AnswerWriter, Prompt
from multimodal.tasks.inspect.answer_places import Seen, places
from multimodal.tasks.inspect.maps import Axis, fitting, names, stacked
from multimodal.tasks.inspect.numbers import HeadSelection, chosen
from multimodal.tasks.inspect.options import ViewOptions
from multimodal.tokens.chat.messages import Message, MessagePart
from multimodal.weights.folder import Checkpoint


class AnswerRequest(NamedTuple):
    """`inputs`: as `Asker` takes them. `answer` None: greedy decoding."""

    inputs: Sequence[Any]
    question: str
    answer: str | None = None


class AnswerMap(NamedTuple):
    """`heads`: the layers and heads whose mean it is. `queries`: the answer's tokens and its end, each at the position
    that predicts it."""

    heads: HeadSelection
    queries: Axis
    seen: list[Seen]


def answer_map(checkpoint: Checkpoint, request: AnswerRequest, options: ViewOptions) -> AnswerMap:
    """Attention of an answer to all that it could see: self-attention, or cross-attention, which sees no text. It is
    the mean of all layers and heads, or of those of `options`.

    Raises UsageError for a model that is no any-to-text model, CheckpointError, TextError, and the errors of inputs."""
    asker = Asker(checkpoint, device=None, compute_type="float32")
    writer, model = asker.writer, asker.writer.network
    pieces = [(name, part) for one in asker.message(request.question, request.inputs).parts
              for name, part in _opened(writer, one)]  # fmt: skip
    messages = [Message("user", tuple(part for _, part in pieces))]
    prompt = writer.prompt(messages)
    given = writer.answer_ids(prompt) if request.answer is None else writer.tokenizer.encode(request.answer)
    ids = [*given, *writer.ends[:1]]
    fitting("answer", [*prompt.ids, *ids], writer.limit or writer.context)
    heads = _mean(captured(writer, prompt, ids), options)
    weights = heads.weights[0, 0]
    inputs = [piece for piece in pieces if piece[1].kind != "text"]
    rows = torch.ones(weights.shape[1], dtype=torch.bool)
    if not model.config.crosses:
        rows = F.pad(model.places(torch.tensor([prompt.ids]))[0], (0, len(ids) - 1))
    seen, parts = [], weights[:, rows].split([len(one.rows) for one in prompt.media] or [0], 1)
    parts = [part for _, part in sorted(zip(prompt.order, parts, strict=False))]  # as in the messages
    for (name, source), medium, part in zip(inputs, writer.media.read_all(messages), parts, strict=False):
        seen += places(checkpoint.preprocessing, model, name, source.time, medium, part)
    if not model.config.crosses:
        text = [i for i, row in zip([*prompt.ids, *ids[:-1]], rows.tolist(), strict=True) if not row]
        own = weights[:, ~rows]
        seen.append(Seen("text", own.sum(-1), own, Axis("token", names(writer.tokenizer, text))))
    return AnswerMap(heads, Axis("token", names(writer.tokenizer, ids)), seen)


def _opened(writer: AnswerWriter, part: MessagePart) -> list[tuple[str, MessagePart]]:
    """Parts of one input with their names: a video's are its frames and windows of sound."""
    name = str(part.value) if isinstance(part.value, str) or hasattr(part.value, "__fspath__") else part.kind
    (opened,) = writer.media.opened([Message("user", (part,))])
    return [(name, one) for one in opened.parts]


@inference_mode()
def captured(writer: AnswerWriter, prompt: Prompt, ids: Sequence[int]) -> Float[Tensor, "L H T S"]:
    """Attention from the positions that predict `ids` to the prompt and the ids before, or to the media's rows."""
    model, decoder = writer.network, writer.decoder
    device, cache = decoder.device, Cache(decoder.config.stack.layers)
    media = torch.cat([torch.zeros(0, decoder.config.width, device=device), *(one.rows for one in prompt.media)])
    if model.config.crosses and not len(media):
        raise UsageError("answer: expected an INPUT, since the model attends to its inputs alone", argument="what")
    source = model.source([media]) if model.config.crosses else ()
    before, after = (torch.tensor([list(part)], device=device) for part in (prompt.ids, ids[:-1]))
    x = decoder.embed(before) if model.config.crosses else model.embed(before, [media])
    x = torch.cat([x, decoder.embed(after.long())], 1)
    every, known = torch.cat([before, after.long()], 1), len(prompt.ids) - 1
    if known:
        decoder.states(every[:, :known], *source, cache=cache, embedded=x[:, :known])
    with capture_attention() as found:
        decoder.states(every[:, known:], *source, cache=cache, embedded=x[:, known:])
    blocks = decoder.stack.blocks
    return stacked({id(block.cross if model.config.crosses else block.attention) for block in blocks}, found)


def _mean(weights: Float[Tensor, "L H T S"], options: ViewOptions) -> HeadSelection:
    layer = "all" if options.layer is None and options.head is None else options.layer
    some = chosen(weights, layer, options.head)
    count = len(some.layers) * len(some.heads)
    return some._replace(weights=some.weights.mean((0, 1))[None, None], label=f"mean of {count} heads")
