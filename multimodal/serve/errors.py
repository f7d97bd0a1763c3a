"""Errors as HTTP statuses with a body in OpenAI's form."""

import errno
import logging
from itertools import takewhile
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from multimodal.errors import MultimodalError, UsageError, one_line
from multimodal.serve.jobs.lane import BusyError, CancelledJobError
from multimodal.serve.models import NoModelError, NotReadyError

log = logging.getLogger(__name__)
INVALID, SERVER = "invalid_request_error", "server_error"


class HttpError(Exception):
    """A refusal with its status. `code`: for programs; `param`: the field at fault; `seconds`: when to try again."""

    def __init__(
        self, status: int, problem: str, code: str | None = None, param: str | None = None, seconds: int | None = None
    ):
        super().__init__(problem)
        self.status, self.code, self.param, self.seconds = status, code, param, seconds

    @property
    def body(self) -> dict[str, Any]:
        kind = INVALID if self.status < 500 else SERVER
        return {"error": {"message": _sendable(str(self)), "type": kind, "param": self.param and _sendable(self.param),
                          "code": self.code}}  # fmt: skip

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.seconds is None else {"retry-after": str(self.seconds)}


def _sendable(text: str) -> str:
    """Escape lone surrogates, which JSON may hold and UTF-8 may not."""
    return text.encode(errors="backslashreplace").decode()


def as_http(error: Exception) -> HttpError:
    """The refusal that an error means. What is no fault of the client is logged, and told without details."""
    text = one_line(error)
    match error:
        case HttpError():
            return error
        case BusyError():
            return HttpError(429, text, "queue_full", seconds=error.seconds)
        case NotReadyError():
            return HttpError(503, text, "not_ready", seconds=2)
        case ClientDisconnect():  # nobody reads this
            return HttpError(400, "the client has gone")
        case CancelledJobError():
            return HttpError(504, "the request took longer than the server allows", "timeout")
        case RequestValidationError() | ValidationError():
            return _invalid(error)
        case UsageError(argument="initial_prompt"):  # a client calls it prompt
            return HttpError(400, text.replace("initial_prompt", "prompt", 1), None, "prompt")
        case NoModelError():
            return HttpError(404, text, "model_not_found", "model")
        case MultimodalError():
            return HttpError(400, text, None, error.argument if isinstance(error, UsageError) else None)
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return HttpError(507, "the server's disk is full", "disk_full")
    log.error("%s: %s", type(error).__name__, text, exc_info=error)
    return HttpError(500, "the server has failed; its log tells why", "internal_error")


def _invalid(error: RequestValidationError | ValidationError) -> HttpError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        problem = first["ctx"]["error"].rstrip(" :").lower()
        where = f" at character {first['loc'][-1]}" if first["loc"] else ""  # pydantic's parser tells it itself
        return HttpError(400, f"body: is not valid JSON ({problem}{where})")
    if first["loc"] == ("body",) and isinstance(first.get("input"), bytes):
        return HttpError(415, "expected content-type application/json")
    # without the kinds that a field may have ("str", "list[int]"), and "[key]"
    names = takewhile(lambda one: one != "str" and "[" not in one, map(str, first["loc"]))
    place = ".".join(one for one in names if one != "body")
    got = "" if first["type"] == "missing" else f" (got {first.get('input')!r:.40})"
    problem = "is not offered" if first.get("ctx", {}).get("max_length") == 0 else first["msg"].lower()
    return HttpError(400, f"{place or 'body'}: {problem}{got}", param=place or None)
