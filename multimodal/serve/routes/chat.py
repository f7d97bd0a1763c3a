"""/v1/chat/completions, as OpenAI's, and /v1/translate."""

import contextlib
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import anyio
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from multimodal.decoding.logits import Penalties
from multimodal.decoding.options import SEEDS
from multimodal.serve.calls import named, opening, outcome, streamed
from multimodal.serve.errors import HttpError
from multimodal.serve.jobs.images import checked
from multimodal.serve.jobs.texts import Answered, TokenScores, translations
from multimodal.serve.media import Media, base64_bytes
from multimodal.serve.state import server_of
from multimodal.tokens.chat.messages import Message, MessagePart

router = APIRouter(prefix="/v1", tags=["text"])
REASONS = {"end": "stop", "stop": "stop", "max_new_tokens": "length", "context": "length"}
DECODING = {"temperature": "temperature", "top_p": "top_p", "seed": "seed", "n": "num_return"}
UNSET = (None, "", [], {})  # fields of a message with these values say nothing
DEFAULT_TOKENS, MOST_TOKENS = 256, 10**9
MOST_TEXTS = 2048  # of a translation
EXAMPLE = {"messages": [{"role": "user", "content": [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}, {"type": "text", "text": "What is this?"},
]}]}  # fmt: skip


class TextRequest(BaseModel):
    """Fields of chats and completions."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, le=32)
    stop: str | Annotated[list[str], Field(max_length=1000, fail_fast=True)] | None = None
    seed: int | None = Field(None, ge=-SEEDS - 1, le=SEEDS)
    stream_options: dict[str, Any] | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    user: str = ""  # without a use here

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, body: Any) -> Any:
        """OpenAI takes null for what is left out."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    def penalties(self) -> Penalties | None:
        """None without any."""
        made = Penalties(self.presence_penalty, self.frequency_penalty, tuple((self.logit_bias or {}).items()))
        return made if any(made) else None

    def usage_in_stream(self) -> bool:
        """Is the stream to end with the usage. Raises HttpError for what a stream does not do."""
        if self.stream and self.n > 1:
            raise HttpError(400, f"n: must be 1 for a stream (got {self.n})", param="n")
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options: needs stream true", param="stream_options")
        return bool((self.stream_options or {}).get("include_usage"))

    def decoding(self) -> dict[str, Any]:
        """Options in our names. The most probable text, or with `n`, a seed or top_p a sample at temperature 1; a
        sample without a seed is another one each time. Raises HttpError."""
        given = {own: value for name, own in DECODING.items() if (value := getattr(self, name)) is not None}
        given.setdefault("temperature", 1.0 if self.n > 1 or {"top_p", "seed"} & given.keys() else 0.0)
        if given["temperature"] == 0 and self.n > 1:
            raise HttpError(400, f"n: {self.n} answers at temperature 0 are all the same (expected 1)", param="n")
        if given["temperature"] == 0:
            for name in ("top_p", "seed"):
                given.pop(name, None)
        else:
            given["seed"] = given.get("seed", secrets.randbits(63)) % (SEEDS + 1)  # a negative one is OpenAI's, too
        if self.stop:
            given["stop"] = self.stop if isinstance(self.stop, str) else tuple(self.stop)
        return given


class UnusedFields(BaseModel):
    """OpenAI's fields of chats without a use here, with the values that change nothing."""

    tools: list[Any] = Field([], max_length=0)
    tool_choice: Literal["none", "auto"] = "none"  # as there are none
    parallel_tool_calls: bool = False
    modalities: list[Literal["text"]] = []
    service_tier: Literal["auto", "default"] = "auto"
    store: Literal[False] = False
    metadata: dict[str, Any] = {}  # of what is stored
    safety_identifier: str = ""
    prompt_cache_key: str = ""


class ChatRequest(UnusedFields, TextRequest):
    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=10_000)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = None

    def top(self) -> int | None:
        """Rivals of each token that are given; None without log-probabilities. Raises HttpError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpError(400, "top_logprobs: needs logprobs true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def decoding(self) -> dict[str, Any]:
        """Raises HttpError, also for a form of answers that is not offered."""
        if (kind := (self.response_format or {"type": "text"}).get("type")) != "text":
            problem = f"response_format: must be text, as answers are not held to a schema (got {str(kind)[:40]!r})"
            raise HttpError(400, problem, param="response_format")
        old, new = self.max_tokens, self.max_completion_tokens
        if len({old, new} - {None}) > 1:
            raise HttpError(400, f"max_tokens: expected max_completion_tokens, {new} (got {old})", param="max_tokens")
        return super().decoding() | {"max_new_tokens": old or new or DEFAULT_TOKENS}


async def read_parts(messages: list[dict[str, Any]], media: Media) -> list[Message]:
    """Messages with their media: nothing that lies on the server's disk is read. Raises HttpError."""
    found = []
    for number, one in enumerate(messages):
        where = f"messages[{number}]"
        role = "system" if one.get("role") == "developer" else one.get("role")
        if role not in ("system", "user", "assistant"):
            raise HttpError(
                400, f"{where}.role: must be system, user or assistant (got {str(role)[:40]!r})", param=where
            )
        if more := [name for name, value in one.items() if name not in ("role", "content") and value not in UNSET]:
            problem = f"{where}.{more[0][:40]}: is not offered (a message has role and content)"
            raise HttpError(400, problem, param=where)
        content = one.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not parts:
            raise HttpError(400, f"{where}.content: expected a text or a list of parts", param=where)
        read = [await _part(part, f"{where}.content[{i}]", media) for i, part in enumerate(parts)]
        found.append(Message(role, tuple(read)))
    return found


async def _part(part: Any, where: str, media: Media) -> MessagePart:
    kind = part.get("type") if isinstance(part, dict) else None
    value = part.get(kind) if isinstance(kind, str) else None
    if kind == "text" and isinstance(value, str):
        return MessagePart("text", value)
    if kind in ("image_url", "video_url", "audio_url") and isinstance(value, str | dict):
        source = await media.read(value if isinstance(value, str) else value.get("url"), where)
        return MessagePart(kind[:5], source, place=where if isinstance(source, bytes) else "")
    if kind == "input_audio" and isinstance(value, dict):
        return MessagePart("audio", base64_bytes(value.get("data"), where), place=where)
    known = "text, image_url, video_url or audio_url with a data URL, input_audio with base64 data"
    raise HttpError(400, f"{where}: expected one of {known} (got {str(kind)[:40]!r})", param=where)


@router.post("/chat/completions")
async def completions(request: Request, body: ChatRequest) -> Response:
    """The assistant's next message. Images and sound go to an any-to-text model."""
    server = server_of(request)
    chat, options, usage = server.chat(body.model), body.decoding(), body.usage_in_stream()
    more = {"top": body.top(), "penalties": body.penalties()}
    base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": chat.served.name}
    async with contextlib.AsyncExitStack() as leave:
        media = Media(request, leave)
        messages = await read_parts(body.messages, media)
        images = [part for one in messages for part in one.parts if part.kind == "image"]
        values, places = [one.value for one in images], [one.place for one in images]
        await anyio.to_thread.run_sync(checked, values, server.options.max_megapixels, places, limiter=opening())
        if body.stream:
            make: Callable[..., Any] = lambda give, _: chat.answers(messages, options, give=give, **more)
            return await _streamed(request, chat, make, base, usage, media)
        with named(media.names):
            make = lambda _: chat.answers(messages, options, **more)
            answered = await outcome(request, chat.served.lane, make)
    choices = [
        {"index": i, "message": {"role": "assistant", "content": one.text},
         "logprobs": scored(scores), "finish_reason": REASONS[one.stopped]}
        for i, (one, scores) in enumerate(zip(answered.answers, answered.scores, strict=True))
    ]  # fmt: skip
    return JSONResponse(base | {"object": "chat.completion", "choices": choices, "usage": counted([answered])})


def scored(scores: TokenScores | None) -> dict[str, Any] | None:
    return None if scores is None else {"content": scores, "refusal": None}


def counted(found: Sequence[Answered]) -> dict[str, int]:
    """Tokens of a request, as OpenAI counts them."""
    prompt, made = sum(one.prompt_tokens for one in found), sum(one.tokens for each in found for one in each.answers)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


async def _streamed(
    request: Request, chat: Any, make: Callable[..., Any], base: dict[str, Any], usage: bool, media: Media
) -> Response:
    """Chunks of an answer. Log-probabilities come in the last one."""

    def chunk(delta: dict[str, Any], reason: str | None = None, scores: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": scored(scores), "finish_reason": reason}
        return base | {"object": "chat.completion.chunk", "choices": [choice]}

    roles = iter([{"role": "assistant"}])
    event = lambda text: chunk(next(roles, {}) | {"content": text})

    def last(answered: Answered) -> list[Any]:
        told = base | {"object": "chat.completion.chunk", "choices": [], "usage": counted([answered])}
        ((one,), (scores,)) = answered.answers, answered.scores
        return [chunk(next(roles, {}), REASONS[one.stopped], scores), *([told] if usage else []), "[DONE]"]

    return await streamed(request, chat.served.lane, make, event, last, media.leave, media.names)


class TranslationRequest(BaseModel):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"input": "A dog runs.", "source": "en", "target": "de"}]}
    )

    input: str | Annotated[list[str], Field(fail_fast=True)]
    source: str | None = None
    target: str | None = None
    model: str | None = None


@router.post("/translate")
async def translate(request: Request, body: TranslationRequest) -> dict[str, Any]:
    """Texts in another language."""
    served = server_of(request).of("translate", body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not 0 < len(texts) <= MOST_TEXTS:
        raise HttpError(400, f"input: expected 1 to {MOST_TEXTS} texts (got {len(texts)})", param="input")
    make = lambda _: translations(served, texts, body.source, body.target)
    found = await outcome(request, served.lane, make)
    data = [{"index": i, "text": one.text, "finished": one.finished} for i, one in enumerate(found)]
    return {"object": "list", "data": data, "model": served.name}
