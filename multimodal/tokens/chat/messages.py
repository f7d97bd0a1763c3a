"""Chat messages: roles, and parts that are text, images, sound or video."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from multimodal.errors import UsageError
from multimodal.system.files import is_data_url, shown

Role = Literal["system", "user", "assistant"]
Kind = Literal["text", "image", "audio", "video"]
URLS: dict[Any, Kind] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
SOURCES = ("path", "url", "base64")  # keys beside the kind's own name under which Hugging Face's messages hold a source


@dataclass(frozen=True)
class MessagePart:
    """`value`: a text, or the source of an image, a recording or a video. `time`: of a frame or the first sample in its
    video, in seconds. `place`: what begins the errors of a medium without a name."""

    kind: Kind
    value: Any
    time: float | None = None
    place: str = ""


@dataclass(frozen=True)
class Message:
    role: Role
    parts: tuple[MessagePart, ...]

    @property
    def text(self) -> str:
        return "".join(part.value for part in self.parts if part.kind == "text")


def read_messages(messages: Any) -> list[Message]:
    """Check messages in the form of Hugging Face and OpenAI: `{"role": …, "content": …}`, where the content is a text
    or a list of parts such as `{"type": "text", "text": …}` and `{"type": "image", "image": …}` (or `path`, `url`), or
    OpenAI's `{"type": "image_url", "image_url": {"url": …}}` with a data URL or one of http or https.

    Raises UsageError that names the message and its fault."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(f"expected a list of messages (got {shown(messages)})", argument="messages")
    return [_message(one, f"messages[{number}]") for number, one in enumerate(messages)]


def _message(one: Any, where: str) -> Message:
    if isinstance(one, Message):
        return one
    if not isinstance(one, Mapping):
        raise UsageError(f"{where}: expected an object with role and content (got {shown(one)})")
    if (role := one.get("role")) not in get_args(Role):
        raise UsageError(f"{where}: role must be one of {', '.join(get_args(Role))} (got {shown(role)})")
    content = one.get("content")
    if isinstance(content, str):
        return Message(role, (MessagePart("text", content),))
    if not isinstance(content, list | tuple) or not content:
        raise UsageError(f"{where}: content must be a text or a list of parts (got {shown(content)})")
    return Message(role, tuple(_part(part, f"{where}: part {i}") for i, part in enumerate(content)))


def _part(part: Any, where: str) -> MessagePart:
    if isinstance(part, MessagePart):
        return part
    if isinstance(part, Mapping) and (name := part.get("type")) in URLS:
        return MessagePart(URLS[name], _at_url(part.get(name), f"{where}: {name}"))
    if not isinstance(part, Mapping) or (kind := part.get("type")) not in get_args(Kind):
        told = part.get("type") if isinstance(part, Mapping) else part
        raise UsageError(f"{where}: type must be one of {', '.join(get_args(Kind))} (got {shown(told)})")
    given = [key for key in (kind, *(SOURCES if kind != "text" else ())) if part.get(key) is not None]
    if len(given) != 1:
        raise UsageError(f"{where}: expected {kind!r} or one of {', '.join(SOURCES)} (got {shown(sorted(part))})")
    value = part[given[0]]
    if kind == "text" and not isinstance(value, str):
        raise UsageError(f"{where}: expected a text (got {shown(value)})")
    if given[0] == "url" and is_data_url(value):
        value = _at_url(value, where)
    return MessagePart(kind, _decoded(value, where) if given[0] == "base64" else value)


def _at_url(value: Any, where: str) -> str | bytes:
    """A URL, or the content of a data URL; no path, which lists of conversations hold elsewhere."""
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url.lower().startswith(("http://", "https://", "data:")):
        raise UsageError(f"{where}: expected a URL of http, https or data (got {shown(value)})")
    if not is_data_url(url):
        return url
    head, _, body = url.partition(",")
    if not head.lower().endswith(";base64"):
        raise UsageError(f"{where}: expected data:TYPE;base64,… (got {shown(url)})")
    return _decoded(body, where)


def _decoded(value: Any, where: str) -> bytes:
    import base64
    import binascii

    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise UsageError(f"{where}: expected base64 (got {shown(value)})") from None
