"""Live sound: /v1/realtime with OpenAI's events, and /v1/audio/stream for plain samples."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from multimodal.errors import MultimodalError, UsageError
from multimodal.serve.errors import HttpError, as_http
from multimodal.serve.guard import PROTOCOL_KEY
from multimodal.serve.jobs.live import LiveRecording
from multimodal.serve.media import base64_bytes
from multimodal.serve.state import Server
from multimodal.tasks.transcribe.live import Event, live_options
from multimodal.tasks.transcribe.options import LiveOptions, options_for

router = APIRouter()
REALTIME_RATE = 24_000  # Hz, of OpenAI's pcm16
IDLE = 300.0  # seconds after which a socket that sends nothing gives its place to others
STREAM_OPTIONS = ("model", "rate", "language")
SILENCE, PADDING = LiveOptions.declared["silence"], LiveOptions.declared["prefix_padding"]


class Socket:
    """A live recording and its socket."""

    def __init__(self, socket: WebSocket, server: Server):
        self.socket, self.server = socket, server
        self.loop, self.events = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.recording: LiveRecording | None = None

    def check_room(self) -> None:
        """Raises HttpError."""
        if self.server.live > (most := self.server.options.streams):
            raise HttpError(429, f"{most} live recordings run already", "queue_full")

    def open(self, model: str | None, values: Mapping[str, Any], decoding: Mapping[str, Any]) -> LiveRecording:
        """Raises UsageError, NotReadyError."""
        served = self.server.of("transcribe", model)
        decode = options_for(served.checkpoint, decoding) if decoding else None
        give = lambda one: self.loop.call_soon_threadsafe(self.events.put_nowait, one)
        self.recording = LiveRecording(served.checkpoint, served.lane, LiveOptions(decode=decode, **values), give)
        return self.recording


@contextlib.asynccontextmanager
async def accepted(socket: WebSocket) -> AsyncIterator[Socket]:
    """An open socket. An error is sent and closes it."""
    server: Server = socket.app.state.server
    offered = [one for one in socket.scope.get("subprotocols", []) if not one.startswith(PROTOCOL_KEY)]
    await socket.accept(subprotocol=offered[0] if offered else None)
    made = Socket(socket, server)
    server.live += 1
    try:
        yield made
    except WebSocketDisconnect:
        pass
    except (MultimodalError, HttpError) as error:
        told = as_http(error)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await socket.send_json({"type": "error"} | told.body)
            await socket.close(1008)
    finally:
        server.live -= 1
        if made.recording is not None:
            made.recording.drop()


@router.websocket("/v1/audio/stream")
async def stream(socket: WebSocket, model: str | None = None, rate: str = "16000", language: str | None = None) -> None:
    """Binary messages hold 16-bit samples of one channel, a text message "end" ends them; answers are JSON messages
    of type partial, final and summary."""
    async with accepted(socket) as own:
        own.check_room()
        if unknown := next((name for name in socket.query_params if name not in STREAM_OPTIONS), None):
            known = ", ".join(STREAM_OPTIONS)
            raise HttpError(400, f"{unknown[:60]}: unknown option (known: {known})", param=unknown[:60])
        values = {"rate": int(rate) if rate.isdecimal() and len(rate) < 10 else rate[:60]}
        recording = own.open(model, values, {} if language is None else {"language": language})
        sending = asyncio.create_task(_send_events(own))
        try:
            while not sending.done():
                message = await _received(socket, sending)
                if message is None:
                    break
                if message.get("bytes") is not None:
                    recording.push(message["bytes"])
                elif message.get("text", "").strip() == "end":
                    recording.close()
                    break
                else:
                    raise UsageError('expected samples, or "end"', argument="message")
            await sending
            await socket.close()
        finally:
            sending.cancel()


async def _received(socket: WebSocket, sending: asyncio.Task[None]) -> Any:
    """The next message; None if the sender of events has ended before. Raises WebSocketDisconnect, HttpError."""
    receiving = asyncio.create_task(socket.receive())
    await asyncio.wait({receiving, sending}, timeout=IDLE, return_when=asyncio.FIRST_COMPLETED)
    if not receiving.done():
        receiving.cancel()
        if not sending.done():
            raise HttpError(408, f"nothing came for {IDLE:g} seconds", "too_slow")
        return None
    message = receiving.result()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    return message


async def _send_events(own: Socket) -> None:
    while True:
        one = await own.events.get()
        if isinstance(one, MultimodalError):
            raise one
        if isinstance(one, Event):
            told = {"type": one.kind, "text": one.text, "start": round(one.start, 3), "end": round(one.end, 3)}
            more = {"stable": one.stable, "latency": round(one.latency, 3)}
            await own.socket.send_json(told | (more if one.kind != "summary" else {}))
            if one.kind == "summary":
                return


class ClientSettings(BaseModel):
    """Part of a session.update. Settings without a use here have the values that change nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, part: Any) -> Any:
        """OpenAI takes null for what is left out, but for turn_detection, which it turns off."""
        if not isinstance(part, dict):
            return part
        return {name: value for name, value in part.items() if value is not None or name == "turn_detection"}


class FormatSettings(ClientSettings):
    type: Literal["audio/pcm"] = "audio/pcm"
    rate: int = REALTIME_RATE


class TurnSettings(ClientSettings):
    type: Literal["server_vad"] = "server_vad"
    silence_duration_ms: FiniteFloat | None = Field(default=None, ge=1000 * SILENCE.low, le=1000 * SILENCE.high)
    prefix_padding_ms: FiniteFloat | None = Field(default=None, ge=1000 * PADDING.low, le=1000 * PADDING.high)
    threshold: FiniteFloat | None = None
    eagerness: Literal["auto"] | None = None
    create_response: bool | None = None  # a transcription has no responses
    interrupt_response: bool | None = None


class TranscriptionSettings(ClientSettings):
    model: str | None = None
    language: str | None = None
    initial_prompt: str | None = Field(default=None, alias="prompt")


class InputSettings(ClientSettings):
    format: FormatSettings | None = None
    turn_detection: TurnSettings | None = None
    transcription: TranscriptionSettings | None = None
    noise_reduction: None = None


class AudioSettings(ClientSettings):
    input: InputSettings | None = None


class SessionSettings(ClientSettings):
    """OpenAI's present form under `audio`, and its earlier one."""

    type: Literal["transcription"] = "transcription"
    object: Literal["realtime.transcription_session"] | None = None
    id: str | None = None
    expires_at: int | None = None
    modalities: list[Literal["text"]] | None = None
    audio: AudioSettings | None = None
    input_audio_format: Literal["pcm16"] | None = None
    input_audio_transcription: TranscriptionSettings | None = None
    input_audio_noise_reduction: None = None
    turn_detection: TurnSettings | None = None
    include: list[str] | None = Field(default=None, max_length=0)


class SessionUpdate(BaseModel):
    session: SessionSettings | None = None


class Realtime:
    """OpenAI's events of a transcription session."""

    def __init__(self, own: Socket, model: str | None):
        self.own, self.model = own, model
        # no partial lines: clients join the deltas, so none may change
        self.values: dict[str, Any] = {"rate": REALTIME_RATE, "step": LiveOptions.declared["longest"].default}
        self.decoding: dict[str, Any] = {}
        self.turns = True  # a pause ends the item, not a commit alone
        self.item, self.before, self.texts = _id("item"), None, list[str]()
        self.finals = 0  # since the last commit
        self.filled = False  # sound has come since the last commit

    def session(self) -> dict[str, Any]:
        served, decoding = self.own.server.of("transcribe", self.model), self.decoding
        live = LiveOptions(**{"threshold": options_for(served.checkpoint, {}).vad_threshold} | self.values)
        turns = {
            "type": "server_vad", "threshold": live.threshold, "prefix_padding_ms": round(1000 * live.prefix_padding),
            "silence_duration_ms": round(1000 * live.silence),
        }  # fmt: skip
        own = {
            "format": {"type": "audio/pcm", "rate": live.rate},
            "transcription": {"model": served.name, "language": decoding.get("language"),
                              "prompt": decoding.get("initial_prompt")},
            "turn_detection": turns if self.turns else None,
        }  # fmt: skip
        return {"type": "transcription", "object": "realtime.transcription_session", "audio": {"input": own}}

    async def send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": _id("event"), **fields}
        await self.own.socket.send_text(json.dumps(event))  # in ASCII: an echoed name may hold half a character

    async def take(self, event: Mapping[str, Any], text: str) -> None:
        """Act on a client's event, which came as `text`. Raises UsageError, HttpError, ValidationError."""
        match event.get("type"):
            case "session.update" | "transcription_session.update":
                self._update(SessionUpdate.model_validate_json(text).session or SessionSettings())
                await self.send("session.updated", session=self.session())
            case "input_audio_buffer.append":
                samples = base64_bytes(event.get("audio"), "audio")
                self._recording().push(samples)
                self.filled |= bool(samples)
            case "input_audio_buffer.commit":
                if not self.filled:
                    problem = "expected sound before a commit (got an empty buffer)"
                    raise HttpError(400, problem, "input_audio_buffer_commit_empty")
                self._recording().commit()
                self.filled = False
            case "input_audio_buffer.clear":
                if self.own.recording is not None:
                    self.own.recording.drop()
                    self.own.recording = None
                self.item, self.texts, self.finals, self.filled = _id("item"), [], 0, False
                await self.send("input_audio_buffer.cleared")
            case other:
                raise UsageError(f"{str(other)[:60]!r} is not an event of a transcription session", argument="type")

    def _recording(self) -> LiveRecording:
        return self.own.recording or self.own.open(self.model, self.values, self.decoding)

    def _update(self, session: SessionSettings) -> None:
        """Change the settings that are named, or none of them if one is refused."""
        if self.own.recording is not None:
            raise UsageError("settings must come before the first sound", argument="session")
        given = (session.audio or AudioSettings()).input or InputSettings()
        stated = [one.turn_detection for one in (given, session) if "turn_detection" in one.model_fields_set]
        turns = next(filter(None, stated), TurnSettings())
        told = given.transcription or session.input_audio_transcription or TranscriptionSettings()
        model = self.model if told.model is None else told.model
        changes: dict[str, Any] = {} if given.format is None else {"rate": given.format.rate}
        if turns.silence_duration_ms is not None:
            changes["silence"] = turns.silence_duration_ms / 1000
        if turns.prefix_padding_ms is not None:
            changes["prefix_padding"] = turns.prefix_padding_ms / 1000
        if turns.threshold is not None:
            changes["threshold"] = turns.threshold
        values = self.values | changes
        asked = self.decoding | told.model_dump(include={"language", "initial_prompt"}, exclude_unset=True)
        decoding = {name: value for name, value in asked.items() if value}
        try:
            checkpoint = self.own.server.of("transcribe", model).checkpoint
            live_options(checkpoint, LiveOptions(decode=options_for(checkpoint, decoding), **values))
        except UsageError as error:
            raise _at_its_path(error, given) from None
        self.model, self.values, self.decoding = model, values, decoding
        self.turns = any(stated) if stated else self.turns

    async def tell(self, one: Any) -> None:
        """Send what the recording gave. Raises its errors."""
        if isinstance(one, MultimodalError):
            raise one
        if one is None:  # after a commit
            if self.texts or not self.finals:
                await self._completed()
            self.finals = 0
        elif one.kind == "final":
            self.texts.append(one.text)
            self.finals += 1
            if self.turns:
                await self._completed()

    async def _completed(self) -> None:
        """End the item; the next line gets another."""
        text, kind = " ".join(self.texts), "conversation.item.input_audio_transcription"
        await self.send("input_audio_buffer.committed", item_id=self.item, previous_item_id=self.before)
        if text:
            await self.send(f"{kind}.delta", item_id=self.item, content_index=0, delta=text)
        await self.send(f"{kind}.completed", item_id=self.item, content_index=0, transcript=text)
        self.before, self.item, self.texts = self.item, _id("item"), []


def _at_its_path(error: UsageError, given: InputSettings) -> HttpError:
    """The refusal of a setting, which it names as the client has."""
    refusal = as_http(error)
    words = "audio.input.transcription" if given.transcription else "input_audio_transcription"
    turns = "audio.input.turn_detection" if given.turn_detection else "turn_detection"
    paths = {name: f"session.{words}.{name}" for name in ("model", "language", "prompt")}
    paths |= {"rate": "session.audio.input.format.rate", "threshold": f"session.{turns}.threshold"}
    refusal.param = paths.get(refusal.param, refusal.param)
    return refusal


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:20]}"


def _parsed(message: Any) -> dict[str, Any]:
    try:
        event = json.loads(message.get("text") or "")
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise UsageError("expected a JSON object", argument="message")
    return event


@router.websocket("/v1/realtime")
async def realtime(socket: WebSocket, intent: str = "transcription", model: str | None = None) -> None:
    """OpenAI's realtime protocol, transcription alone."""
    async with accepted(socket) as own:
        own.check_room()
        if intent != "transcription":
            raise UsageError(f"{intent[:40]!r}: this server offers transcription", argument="intent")
        own.server.of("transcribe", model)
        session = Realtime(own, model)
        await session.send("session.created", session=session.session())
        sending = asyncio.create_task(_tell_all(own, session))
        try:
            while (message := await _received(socket, sending)) is not None:
                event: dict[str, Any] = {}
                try:
                    event = _parsed(message)
                    await session.take(event, message["text"])
                except (MultimodalError, HttpError, ValidationError) as error:  # the session goes on
                    cause = {"event_id": str(event["event_id"])} if "event_id" in event else {}
                    await session.send("error", error=as_http(error).body["error"] | cause)
            await sending
        finally:
            sending.cancel()


async def _tell_all(own: Socket, session: Realtime) -> None:
    while True:
        await session.tell(await own.events.get())
