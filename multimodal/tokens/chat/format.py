"""A checkpoint's chat format: its template, and how images, sound and video are written among the text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from multimodal.errors import CheckpointError
from multimodal.system.files import shown
from multimodal.tokens.chat.messages import Kind, Message, MessagePart
from multimodal.tokens.chat.template import render
from multimodal.tokens.text.tokenizer import Tokenizer

ROLES, END = ("<|user|>", "<|assistant|>", "<|system|>"), "<|end|>"
MARKERS: dict[Kind, str] = {"image": "<|image|>", "audio": "<|audio|>"}
CONTROLS = (*ROLES, END, *MARKERS.values())
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<|{{ p.type }}|>{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class ChatFormat:
    """`template`: Jinja source. `image`, `audio`, `video`: names of control tokens that stand for a row of such a
    medium, and which the template writes once a part; None: the model does not take it (a video without `video` is
    read as its frames and sound). `eos`: names of tokens that end an answer, beside the tokenizer's. `tokens`: names
    of control tokens that the template reads, such as `bos_token`."""

    template: str
    image: str | None = None
    audio: str | None = None
    video: str | None = None
    eos: tuple[str, ...] = ()
    tokens: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.template.strip():
            raise CheckpointError("template: is empty")

    @property
    def markers(self) -> dict[Kind, str]:
        return {kind: name for kind in ("image", "audio", "video") if (name := getattr(self, kind)) is not None}

    @cached_property
    def loops(self) -> bool:
        """True if the template reads a content as a list of parts alone, and would drop a text (LLaVA, Idefics3)."""
        message = Message("user", (MessagePart("text", "probe"),))
        for parts in (False, True):
            try:
                if "probe" in render(self.template, [message], (), self.tokens, parts=parts):
                    return parts
            except CheckpointError:
                continue
        return False

    def ids(
        self, messages: Sequence[Message], markup: Sequence[str], tokenizer: Tokenizer, where: str
    ) -> tuple[list[int], list[int]]:
        """Ids of `text`, and its order of media. With media they begin with bos, which transformers' processors put
        before a template without it, and its tokenizers do not."""
        text, order = self.text(messages, markup, tokenizer, where)
        ids = tokenizer.encode_template(text)
        start = [tokenizer.bos_id] if self.markers and tokenizer.bos_id is not None else []
        return (ids if ids[:1] == start else start + ids), order

    def text(
        self, messages: Sequence[Message], markup: Sequence[str], tokenizer: Tokenizer, where: str
    ) -> tuple[str, list[int]]:
        """The rendered conversation, in which each marker is the next medium of its kind and becomes its `markup`, and
        the indices of the media in the text's order (LLaVA's templates write images first). Raises CheckpointError for
        a template that leaves a medium out, or writes one twice."""
        rendered = render(self.template, messages, tokenizer.control_names, self.tokens, where, self.loops)
        pattern = "|".join(map(re.escape, self.markers.values())) or "$^"
        pieces, kinds = re.split(f"({pattern})", rendered), {name: kind for kind, name in self.markers.items()}
        written, given = [kinds[marker] for marker in pieces[1::2]], [part.kind for part in media(messages)]
        if sorted(written) != sorted(given):
            raise CheckpointError(f"{where}: wrote media {shown(written)} for {shown(given)} in the messages")
        left = {kind: iter([i for i, one in enumerate(given) if one == kind]) for kind in self.markers}
        order = [next(left[kind]) for kind in written]
        pieces[1::2] = [markup[i] for i in order]
        return "".join(pieces), order

    def end_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Ids that end an answer. Raises CheckpointError for a name that the tokenizer lacks."""
        if missing := [name for name in self.eos if name not in tokenizer.control_names]:
            raise CheckpointError(f"chat format: the tokenizer has no token {missing[0]!r}")
        own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        return list(dict.fromkeys([*(tokenizer.control_names[name] for name in self.eos), *own]))


def media(messages: Sequence[Message]) -> Iterator[MessagePart]:
    """Parts that are no text, in order."""
    return (part for message in messages for part in message.parts if part.kind != "text")


def plain_format(image: bool, audio: bool) -> ChatFormat:
    """The format of models that are trained here, for tokenizers that have `CONTROLS`."""
    return ChatFormat(PLAIN, MARKERS["image"] if image else None, MARKERS["audio"] if audio else None, eos=(END,))
