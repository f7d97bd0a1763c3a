"""GET over http and https, restricted to allowed hosts and addresses, with timeouts."""

import base64
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from multimodal.data.remote.trust import WEB, Trust, host_of
from multimodal.errors import one_line

CONNECT = 10.0  # seconds
READ = 60.0  # seconds without a byte
ADDRESSES = 3  # of a host, tried in turn
REDIRECTS = 5
AGENT = "multimodal"
NAT64 = ipaddress.ip_network("64:ff9b::/96")
RETRIED = {408, 425, 429, 500, 502, 503, 504}  # transient HTTP statuses


class RefusedError(Exception):
    """The rule forbids a host, an address or a redirect."""


class TransientError(Exception):
    """An error worth a retry."""


class UrlRule:
    """Hosts that one URL and its redirects may reach. `trust` None: the user's own URL, which may reach any public host
    and its own; else a row of a list, which may reach named hosts and that of `origin`."""

    def __init__(self, url: str, trust: Trust | None = None, origin: str = ""):
        self.trust, self.own = trust, urlsplit(url if trust is None else origin).hostname
        self.line: socket.socket | None = None

    def host(self, url: str) -> None:
        """Raises RefusedError for a URL that must not be followed."""
        names = host_of(url) if url.partition(":")[0].lower() in WEB else None
        if names is None:
            raise RefusedError(f"leads to {url[:80]!r}, which is not read")
        if self.trust is not None and self.own not in names and (cause := self.trust.refuses_url(url)):
            raise RefusedError(f"leads to another host: {cause}")

    def address(self, host: str, address: str, port: int) -> None:
        """Raises RefusedError for an internal address that was not named."""
        if host in (self.own, "localhost") or _public(address):
            return
        named = set() if self.trust is None else {name.rpartition("://")[2] for name in self.trust.hosts()}
        if not {address, f"{address}:{port}"} & named:
            more = "" if self.trust is None else f"; --remote {host} {address} allows it"
            raise RefusedError(f"{host} is the internal address {address}{more}")

    def connect(self, place: tuple[str, int], checked: bool = True) -> socket.socket:
        """Connect as `socket.create_connection` to the checked address itself: a second look-up could differ."""
        host, error = place[0].strip("[]").lower(), None
        for family, kind, protocol, _name, address in socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[:ADDRESSES]:
            if checked:
                self.address(host, str(address[0]).partition("%")[0], place[1])
            made = socket.socket(family, kind, protocol)
            try:
                made.settimeout(CONNECT)
                made.connect(address)
                made.settimeout(READ)
            except OSError as cause:
                made.close()
                error = cause
            else:
                self.close()
                self.line = made.dup()  # TLS takes the socket itself over
                return made
        raise error or OSError(f"{host} has no address")

    def abort(self) -> None:
        """End another thread's wait."""
        if self.line is not None:
            with contextlib.suppress(OSError):  # closed already
                self.line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.line is not None:
            self.line.close()


def _public(text: str) -> bool:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped or address in NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        elif address.sixtofour or address.teredo:
            return False
    return address.is_global and not address.is_multicast


class Body:
    """Body of a response, whose length must be as announced."""

    def __init__(self, answer: http.client.HTTPResponse, rule: UrlRule):
        self.answer, self.left, self.rule = answer, answer.length, rule

    def read(self, size: int) -> bytes:
        try:
            data = self.answer.read1(size)
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise TransientError(f"broken off ({_line(error)})") from None
        if self.left is not None:
            self.left -= len(data)
            if not data and self.left:
                raise TransientError(f"ends early ({self.left} bytes are missing)")
        return data

    def close(self) -> None:
        self.answer.close()
        self.rule.close()


def opened(url: str, rule: UrlRule) -> Body:
    """Open a URL. Raises RefusedError, TransientError, or OSError for a permanent error."""
    rule.host(url)
    director = urllib.request.OpenerDirector()
    handlers = (urllib.request.ProxyHandler(), _RuledHandler(rule), _Redirect(rule),
                urllib.request.HTTPErrorProcessor(),
                urllib.request.HTTPDefaultErrorHandler())  # fmt: skip
    for handler in handlers:
        director.add_handler(handler)
    director.addheaders = []
    try:
        return Body(_answer(director, url), rule)
    except BaseException:
        rule.close()
        raise


def _answer(director: urllib.request.OpenerDirector, url: str) -> http.client.HTTPResponse:
    try:
        return director.open(_request(url))
    except urllib.error.HTTPError as error:
        answer = f"HTTP {error.code} {error.reason}"
        error.close()
        if error.filename.partition(":")[0].lower() not in WEB:  # the target of a redirect
            raise RefusedError(f"leads to {error.filename[:80]!r}, which is not read") from None
        raise (TransientError if error.code in RETRIED else OSError)(answer) from None
    except urllib.error.URLError as error:
        cause = error.reason
        final = not isinstance(cause, OSError) or isinstance(cause, ssl.SSLCertVerificationError)
        raise (OSError if final else TransientError)(_line(cause)) from None
    except (http.client.HTTPException, OSError) as error:
        raise TransientError(_line(error)) from None


def _request(url: str) -> urllib.request.Request:
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    plain = parts._replace(netloc=place, path=_quoted(parts.path), query=_quoted(parts.query), fragment="").geturl()
    request = urllib.request.Request(plain, headers={"User-Agent": AGENT, "Accept-Encoding": "identity"})
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(secret).decode()}")
    return request


def _quoted(text: str) -> str:
    return quote(text, safe="%/:=&?~+!$,;'@()*[]")


class _RuledHandler(urllib.request.AbstractHTTPHandler):
    """Opens http and https over the rule's connections."""

    def __init__(self, rule: UrlRule):
        super().__init__()
        self.rule = rule
        self.http_request = self.https_request = self.do_request_

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self._opened(http.client.HTTPConnection, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self._opened(http.client.HTTPSConnection, request)

    def _opened(self, kind: type[http.client.HTTPConnection], request: urllib.request.Request) -> Any:
        proxied = request.has_proxy() or request._tunnel_host  # by the user's own proxy, which resolves names itself

        def made(*args: Any, **options: Any) -> http.client.HTTPConnection:
            connection = kind(*args, **options)
            connection._create_connection = lambda place, *_, **__: self.rule.connect(place, checked=not proxied)
            return connection

        return self.do_open(made, request)


class _Redirect(urllib.request.HTTPRedirectHandler):
    max_redirections, max_repeats = REDIRECTS, 2
    inf_msg = f"redirects in a circle, or more than {REDIRECTS} times: "

    def __init__(self, rule: UrlRule):
        self.rule = rule

    def redirect_request(self, request: Any, file: Any, code: int, message: str, headers: Any, url: str) -> Any:
        try:
            self.rule.host(url)
        except RefusedError:
            file.close()
            raise
        return super().redirect_request(request, file, code, message, headers, url)


def _line(error: BaseException | str) -> str:
    return re.sub(r"^\[Errno -?\d+\] ", "", one_line(error))
