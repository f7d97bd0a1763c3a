"""Chat templates in Jinja, rendered in its sandbox with bounded work.

A template decides where control tokens stand; nothing that a user wrote becomes one. Each name of a control token with
a character of a user has a noncharacter (U+FDD0) inside; encoding drops it (`Tokenizer.encode_template`)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multimodal.errors import CheckpointError, one_line
from multimodal.tokens.chat.budget import bounded
from multimodal.tokens.chat.messages import Message
from multimodal.tokens.chat.sandbox import compiled
from multimodal.tokens.chat.user_text import UserText, marked
from multimodal.tokens.text.tokenizer import MARK

MOST_TEMPLATE = 1 << 18  # characters; the longest in use have 30,000


def render(
    template: str, messages: Sequence[Message], control: Iterable[str], variables: Mapping[str, Any] | None = None,
    where: str = "chat template", parts: bool = False,
) -> str:  # fmt: skip
    """The text of a conversation up to where the assistant's answer begins, with `MARK`s in names that users wrote.

    `control`: names of control tokens. `variables`: what the template reads beside the messages, such as `bos_token`.
    Parts that are no text are rendered by the template as their marker. `parts`: contents that are text alone are lists
    of parts too. Raises CheckpointError for a template that is no Jinja, reads attributes that the sandbox forbids,
    raises, or does not end soon."""
    from jinja2.exceptions import TemplateError

    plain = [{"role": m.role, "content": _content(m, parts)} for m in messages]
    if len(template) > MOST_TEMPLATE:
        raise CheckpointError(f"{where}: has {len(template)} characters (limit {MOST_TEMPLATE})")
    try:
        with bounded(sum(len(m.text) for m in messages)):
            made = compiled(template)
            none = {"tools": None, "documents": None}
            text = made.render(messages=plain, add_generation_prompt=True, **none, **(variables or {}))
    except TemplateError as error:
        raise CheckpointError(f"{where}: {one_line(error, 200)}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError, MemoryError,
            SyntaxError) as error:  # fmt: skip
        cause = f"{type(error).__name__}: {one_line(error, 160)}"
        raise CheckpointError(f"{where}: cannot be rendered ({cause})") from None
    return marked(text, control)


def _content(message: Message, parts: bool) -> str | list[dict[str, str]]:
    """A text, or parts: templates for text alone join nothing."""
    if not parts and all(part.kind == "text" for part in message.parts):
        return _typed(message.text)
    return [
        {"type": part.kind, "text": _typed(part.value)} if part.kind == "text" else {"type": part.kind}
        for part in message.parts
    ]


def _typed(text: str) -> UserText:
    return UserText(text.replace(MARK, ""))
