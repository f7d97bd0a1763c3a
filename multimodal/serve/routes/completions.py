"""/v1/completions, as OpenAI's: texts that a language model continues, and log-probabilities of given ones."""

import contextlib
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from multimodal.serve.calls import outcome, streamed
from multimodal.serve.errors import HttpError
from multimodal.serve.jobs.completions import CompletionJob
from multimodal.serve.jobs.texts import Answered, TokenScores
from multimodal.serve.routes.chat import MOST_TEXTS, MOST_TOKENS, REASONS, TextRequest, counted
from multimodal.serve.state import server_of

router = APIRouter(prefix="/v1", tags=["text"])
DEFAULT_TOKENS = 16  # OpenAI's
Ids = Annotated[list[int], Field(fail_fast=True)]


class CompletionRequest(TextRequest):
    """`prompt`: a text, its token ids, or a list of either. `echo`: the prompt is part of the text, and with `logprobs`
    its tokens are scored; with `max_tokens` 0 they alone are."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "A dog", "max_tokens": 8}]})

    prompt: str | Ids | Annotated[list[str | Ids], Field(fail_fast=True)]
    max_tokens: int = Field(DEFAULT_TOKENS, ge=0, le=MOST_TOKENS)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int = 1
    suffix: Literal[""] = ""

    def prompts(self) -> list[str | list[int]]:
        """Raises HttpError."""
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        found: list[Any] = [self.prompt] if one else list(self.prompt)
        if not 0 < len(found) <= MOST_TEXTS:
            raise HttpError(400, f"prompt: expected 1 to {MOST_TEXTS} texts (got {len(found)})", param="prompt")
        if self.stream and len(found) > 1:
            raise HttpError(400, f"prompt: must be one for a stream (got {len(found)})", param="prompt")
        if self.best_of not in (1, self.n):
            raise HttpError(400, f"best_of: must be n, {self.n} (got {self.best_of})", param="best_of")
        return found


@router.post("/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continuations of prompts as they are, without a chat template."""
    chat, prompts, usage = server_of(request).chat(body.model), body.prompts(), body.usage_in_stream()
    options, more = body.decoding(), {"top": body.logprobs, "echo": body.echo, "penalties": body.penalties()}
    make: Callable[..., CompletionJob] = lambda give=None: CompletionJob(
        chat, prompts, options, body.max_tokens, give=give, **more
    )
    base = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": chat.served.name}  # fmt: skip

    def last(found: list[Answered]) -> list[Any]:
        ((one,), (scores,)) = found[0].answers, found[0].scores
        told = [base | {"choices": [], "usage": counted(found)}] if usage else []
        return [base | {"choices": [choice("", 0, REASONS[one.stopped], scores)]}, *told, "[DONE]"]

    if body.stream:
        event = lambda text: base | {"choices": [choice(text)]}
        async with contextlib.AsyncExitStack() as leave:
            return await streamed(request, chat.served.lane, lambda give, _: make(give), event, last, leave, {})
    found = await outcome(request, chat.served.lane, lambda _: make())
    every = [pair for each in found for pair in zip(each.answers, each.scores, strict=True)]
    choices = [choice(one.text, i, REASONS[one.stopped], scores) for i, (one, scores) in enumerate(every)]
    return JSONResponse(base | {"choices": choices, "usage": counted(found)})


def choice(text: str, number: int = 0, reason: str | None = None, scores: TokenScores | None = None) -> dict[str, Any]:
    told = None if scores is None else legacy(scores)
    return {"index": number, "text": text, "logprobs": told, "finish_reason": reason}


def legacy(scores: TokenScores) -> dict[str, Any]:
    """Log-probabilities in the form of completions: lists of the tokens, and of where they begin in the text."""
    offsets, end = list[int](), 0
    for one in scores:
        offsets.append(end)
        end += sum(byte & 0xC0 != 0x80 for byte in one["bytes"])  # characters that begin in it
    rivals = lambda one: {other["token"]: other["logprob"] for other in reversed([one, *one["top_logprobs"]])}
    tops = [None if one["logprob"] is None else rivals(one) for one in scores]
    return {"tokens": [one["token"] for one in scores], "token_logprobs": [one["logprob"] for one in scores],
            "top_logprobs": tops, "text_offset": offsets}  # fmt: skip
