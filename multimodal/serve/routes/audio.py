"""/v1/audio: transcriptions and translations, as OpenAI's."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from multimodal.models.whisper import Whisper
from multimodal.serve.calls import named, outcome, streamed
from multimodal.serve.errors import HttpError
from multimodal.serve.jobs.lane import Job
from multimodal.serve.jobs.speech import TranscriptionJob
from multimodal.serve.jobs.token_bytes import spellings, token_score
from multimodal.serve.media import Media
from multimodal.serve.state import server_of
from multimodal.serve.uploads import SMALL, Form, received
from multimodal.tasks.text.detokenize import token_texts
from multimodal.tasks.transcribe.audio_source import name_of_audio
from multimodal.tasks.transcribe.writers import srt, vtt
from multimodal.tokens.text.languages import LANGUAGES
from multimodal.weights.folder import Checkpoint

router = APIRouter(prefix="/v1/audio", tags=["audio"])
FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
FIELDS = ("file", "url", "model", "language", "prompt", "response_format", "temperature", "timestamp_granularities",
          "stream", "include", "chunking_strategy")  # fmt: skip
UPLOAD = {"required": True, "content": {"multipart/form-data": {"schema": {
    "type": "object", "properties": {
        "file": {"type": "string", "format": "binary", "description": "recording or video, judged by its content"},
        "url": {"type": "string", "description": "in place of a file, on a host that the server may read"},
        "model": {"type": "string"}, "language": {"type": "string", "examples": ["en"]}, "prompt": {"type": "string"},
        "response_format": {"type": "string", "enum": list(FORMATS)},
        "temperature": {"type": "number", "description": "0: 0, and higher ones where decoding fails"},
        "timestamp_granularities[]": {"type": "array", "items": {"type": "string", "enum": ["word", "segment"]}},
        "stream": {"type": "boolean"},
    }}}}}  # fmt: skip


@router.post("/transcriptions", openapi_extra={"requestBody": UPLOAD})
async def transcriptions(request: Request) -> Response:
    """Text of a recording, in its language."""
    return await _respond(request, "transcribe")


@router.post("/translations", openapi_extra={"requestBody": UPLOAD})
async def translations(request: Request) -> Response:
    """English text of a recording, by a Whisper model."""
    return await _respond(request, "translate")


async def _respond(request: Request, task: str) -> Response:
    server = server_of(request)
    server.models.check()
    if unknown := next((name for name in request.query_params if name != "api-version"), None):  # Azure's
        raise HttpError(400, f"{unknown[:60]}: must be a field of the form, not of the address", param=unknown[:60])
    async with contextlib.AsyncExitStack() as leave:
        form = await leave.enter_async_context(received(request, server.folder, SMALL))
        style, options = _options(form, task)
        served, media = server.of("transcribe", form.text("model")), Media(request, leave)
        if (url := form.text("url")) is not None and "file" in form.files:
            raise HttpError(400, "url: expected a file or a url, got both", param="url")
        audio = form.file() if url is None else await media.read(url, "url")
        names = media.names | ({name_of_audio(audio): "file"} if url is None else {})
        if _streams(form):
            granularities = form.texts.get("timestamp_granularities", [])
            whole = lambda result: verbose(result, task, granularities) if style == "verbose_json" else {}
            return await _stream(request, served, audio, options, leave, names, whole)
        with named(names):
            make = lambda over: TranscriptionJob(served.checkpoint, audio, options, over)
            result = await outcome(request, served.lane, make)
    server.metrics.audio.inc(result["duration"])
    scores = logprobs(served.checkpoint, result["segments"]) if options["token_logprobs"] else {}
    return _written(result, style, task, form.texts.get("timestamp_granularities", []), scores)


def _options(form: Form, task: str) -> tuple[str, dict[str, Any]]:
    """Form of the answer and the options of decoding. Raises HttpError."""
    names = (*form.texts, *form.files)
    chunking = next((name for name in names if name.startswith("chunking_strategy[")), "chunking_strategy")  # an object
    if (strategy := form.text(chunking) or "auto") != "auto" or chunking != "chunking_strategy":
        raise HttpError(400, f"chunking_strategy: must be auto (got {strategy[:40]!r})", param="chunking_strategy")
    if unknown := [name for name in names if name not in FIELDS]:
        raise HttpError(400, f"{unknown[0][:60]}: unknown field (known: {', '.join(FIELDS)})", param=unknown[0][:60])
    style = form.text("response_format") or "json"
    if style not in FORMATS:
        raise HttpError(400, f"response_format: must be one of {', '.join(FORMATS)} (got {style[:40]!r})",
                        param="response_format")  # fmt: skip
    if _streams(form) and style in ("srt", "vtt"):
        problem = f"response_format: events are json, text or verbose_json (got {style})"
        raise HttpError(400, problem, param="response_format")
    include = form.texts.get("include", [])
    if wrong := [one for one in include if one != "logprobs"]:
        raise HttpError(400, f"include: must be logprobs (got {wrong[0][:40]!r})", param="include")
    if include and style not in ("json", "verbose_json"):
        raise HttpError(400, f"include: logprobs need response_format json or verbose_json (got {style})",
                        param="include")  # fmt: skip
    options: dict[str, Any] = {"task": task, "token_logprobs": bool(include)}
    if language := form.text("language"):
        options["language"] = language
    if prompt := form.text("prompt"):
        options["initial_prompt"] = prompt
    if temperature := form.text("temperature"):
        try:
            value = float(temperature)
        except ValueError:
            problem = f"temperature: expected a number (got {temperature[:40]!r})"
            raise HttpError(400, problem, param="temperature") from None
        if not 0 <= value <= 1:
            raise HttpError(400, f"temperature: must be in 0 to 1 (got {value:g})", param="temperature")
        if value:
            options["temperature"] = (value,)
    granularities = form.texts.get("timestamp_granularities", [])
    if wrong := [one for one in granularities if one not in ("word", "segment")]:
        raise HttpError(400, f"timestamp_granularities: must be word or segment (got {wrong[0][:40]!r})",
                        param="timestamp_granularities")  # fmt: skip
    if granularities and style != "verbose_json":
        raise HttpError(400, f"timestamp_granularities: need response_format verbose_json (got {style})",
                        param="timestamp_granularities")  # fmt: skip
    options["word_timestamps"] = "word" in granularities
    return style, options


def _streams(form: Form) -> bool:
    text = form.text("stream") or "false"
    if text.lower() not in ("true", "false", "1", "0"):
        raise HttpError(400, f"stream: must be true or false (got {text[:40]!r})", param="stream")
    return text.lower() in ("true", "1")


async def _stream(
    request: Request, served: Any, audio: Any, options: dict[str, Any], leave: contextlib.AsyncExitStack,
    names: dict[str, str], whole: Callable[[dict[str, Any]], dict[str, Any]],
) -> Response:  # fmt: skip
    """Events of OpenAI's: the text as segments end, then all of it, with what `whole` gives of the result."""
    server = server_of(request)
    scores = lambda segments: logprobs(served.checkpoint, segments) if options["token_logprobs"] else {}
    between = "" if isinstance(served.checkpoint.model, Whisper) else " "  # Whisper's texts hold their spaces

    def make(give: Callable[[Any], None], over: threading.Event) -> Job:
        texts, told = list[str](), ""

        def on_segments(_: Any, segments: list[dict[str, Any]]) -> None:
            nonlocal told
            for one in segments:
                texts.append(one["text"])
                before, told = told, between.join(texts).strip()
                give({"type": "transcript.text.delta", "delta": told[len(before) :]} | scores([one]))

        return TranscriptionJob(served.checkpoint, audio, options, over, on_segments)

    def last(result: dict[str, Any]) -> list[dict[str, Any]]:
        server.metrics.audio.inc(result["duration"])
        done = {"type": "transcript.text.done", "text": result["text"].strip()}
        return [whole(result) | done | scores(result["segments"])]

    return await streamed(request, served.lane, make, dict, last, leave, names)


def _written(
    result: dict[str, Any], style: str, task: str, granularities: list[str], scores: dict[str, Any]
) -> Response:
    match style:
        case "text":
            return PlainTextResponse(result["text"].strip() + "\n")
        case "srt":
            return PlainTextResponse(srt(result))
        case "vtt":
            return PlainTextResponse(vtt(result), media_type="text/vtt")
        case "verbose_json":
            return JSONResponse(verbose(result, task, granularities) | scores)
    return JSONResponse({"text": result["text"].strip()} | scores)


def logprobs(checkpoint: Checkpoint, segments: list[dict[str, Any]]) -> dict[str, Any]:
    """Log-probabilities of the tokens of segments, without Whisper's times."""
    tokenizer = checkpoint.required_tokenizer()
    pairs = [
        (token, value)
        for one in segments
        for token, value in zip(one["tokens"], one["token_logprobs"], strict=True)
        if token not in tokenizer.control
    ]
    ids = [token for token, _ in pairs]
    spelled = spellings(tokenizer, ids, token_texts(tokenizer, [], ids))
    return {"logprobs": [token_score(one, value) for one, (_, value) in zip(spelled, pairs, strict=True)]}


def verbose(result: dict[str, Any], task: str, granularities: list[str]) -> dict[str, Any]:
    """OpenAI's verbose_json and the damaged spans. Segments have what the model gives."""
    language = "en" if task == "translate" else result["language"]
    told = {"task": task, "language": LANGUAGES.get(language, language), "duration": result["duration"],
            "text": result["text"].strip(), "damaged": result["damaged"]}  # fmt: skip
    if "word" in granularities:
        words = [word for segment in result["segments"] for word in segment.get("words", [])]
        told["words"] = [{"word": one["word"].strip(), "start": one["start"], "end": one["end"]} for one in words]
    if "segment" in granularities or not granularities:
        told["segments"] = [
            {k: v for k, v in one.items() if k not in ("words", "token_logprobs")} for one in result["segments"]
        ]
    return told
