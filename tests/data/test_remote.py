"""Copies of what URLs hold, from a server on this machine that redirects, stalls, drips and never ends."""

import contextlib
import gzip
import http.server
import re
import threading
from pathlib import Path

import pytest

from multimodal.data import shards
from multimodal.data.remote import copies, web
from multimodal.data.remote.copies import fetch
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import open_source
from multimodal.data.validate import validate
from multimodal.errors import DataError
from tests.helpers.data import sets
from tests.helpers.data.servers import LocalServer, QuietRequest
from tests.helpers.spread import thin


class Server(LocalServer):
    """`asked`: the paths of all requests, `ended` lets waiting ones go."""

    def __init__(self):
        super().__init__(Handler)
        self.asked: list[str] = []
        self.ended = threading.Event()


class Handler(QuietRequest, http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        with contextlib.suppress(OSError):  # the client has gone
            getattr(self, re.match(r"/(\w+)", self.path)[1])()

    def answer(self, code: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def good(self) -> None:
        self.answer(200, sets.png(7))

    def secret(self) -> None:
        known = self.headers.get("Authorization") == "Basic dXNlcjpwIHc="
        self.answer(200 if known else 401, sets.png(7))

    def missing(self) -> None:
        self.answer(404)

    def busy(self) -> None:
        self.answer(503 if len(self.server.asked) < 3 else 200, sets.png(7))

    def down(self) -> None:
        self.answer(503)

    def short(self) -> None:
        self.answer(200, b"abc", length=10)

    def inside(self) -> None:
        self.answer(302, Location="/good.png")

    def local(self) -> None:
        self.answer(302, Location=f"http://localhost:{self.server.server_port}/good.png")

    def metadata(self) -> None:
        self.answer(302, Location="http://169.254.169.254/latest/meta-data")

    def etc(self) -> None:
        self.answer(302, Location="file:///etc/passwd")

    def circle(self) -> None:
        self.answer(302, Location=f"/circle/{len(self.server.asked)}")

    def silent(self) -> None:
        self.server.ended.wait(20)

    def stalled(self) -> None:
        self.answer(200, b"x" * 5000, length=10000)
        self.server.ended.wait(20)

    def drip(self) -> None:
        self.answer(200, length=1 << 20)
        while not self.server.ended.wait(0.02):
            self.wfile.write(b"x")

    def headers_drip(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while not self.server.ended.wait(0.02):
            self.wfile.write(b"x")

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.server.ended.is_set():
            self.wfile.write(bytes(1 << 16))


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(copies, "PAUSE", 0.01)
    monkeypatch.setenv("no_proxy", "*")
    with Server() as made:
        yield made
        made.ended.set()


def left(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("*") if path.suffix != ".lock"]


def test_good_answers(server, tmp_path):
    for name in ("good.png", "inside.png", "local.png", "busy.png", "good.png?ü=ö #x"):
        server.asked.clear()
        assert fetch(f"{server.url}/{name}", tmp_path).read_bytes() == sets.png(7), name
    count = len(server.asked)
    fetch(f"{server.url}/good.png", tmp_path)
    assert len(server.asked) == count
    url = f"{server.url}/secret.png".replace("http://", "http://user:p%20w@")
    assert fetch(url, tmp_path).read_bytes() == sets.png(7)


@pytest.mark.parametrize(
    ("name", "cause", "asked"),
    [
        ("missing.png", "HTTP 404", 1), ("down.png", "HTTP 503 .*, tried 3 times", 3),
        ("short.png", r"ends early \(7 bytes are missing\), tried 3 times", 3),
        ("circle.png", "HTTP 302 redirects in a circle, or more than 5 times", None),
        ("metadata.png", "169.254.169.254 is the internal address 169.254.169.254", 1),
        ("etc.png", "leads to 'file:///etc/passwd', which is not read", 1),
    ],
)  # fmt: skip
def test_bad_answers_are_one_line(name, cause, asked, server, tmp_path):
    with pytest.raises(DataError, match=cause) as caught:
        fetch(f"{server.url}/{name}", tmp_path)
    assert str(caught.value).startswith(f"{server.url}/{name}: cannot be copied to ")
    assert "\n" not in str(caught.value)
    assert len(server.asked) == asked if asked else len(server.asked) <= web.REDIRECTS + 1
    assert left(tmp_path) == []


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", ["silent", "stalled", "drip", "headers_drip"])
def test_slow_answers_are_given_up(name, server, tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "PATIENCE", 0.4)
    monkeypatch.setattr(copies, "LEAST", 1 << 20)
    with pytest.raises(DataError, match=r"given up: \d+ bytes in 0\.4 s"):
        fetch(f"{server.url}/{name}.png", tmp_path)
    assert (len(server.asked), left(tmp_path)) == (1, [])


def test_endless_answers_and_full_disks_are_given_up(server, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"too large \(over 1000000 bytes\)"):
        fetch(f"{server.url}/endless.png", tmp_path, most=1_000_000)
    monkeypatch.setattr(copies, "FREE", 1 << 62)
    with pytest.raises(DataError, match="the disk is full"):
        fetch(f"{server.url}/good.png", tmp_path)
    assert left(tmp_path) == []


def test_a_server_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "PAUSE", 0.01)
    with pytest.raises(DataError, match=r"refused, tried 3 times"):
        fetch("http://127.0.0.1:9/x.jpg", tmp_path)


def test_stores_without_a_driver_and_unknown_schemes(tmp_path):
    with pytest.raises(DataError, match=r"gs://bucket/x\.tar: cannot be copied .*gcsfs"):
        fetch("gs://bucket/x.tar", tmp_path)
    for url in ("file:///etc/passwd", "ftp://x/y", "ssh://x/y", "local:///etc/passwd", "pipe:true"):
        with pytest.raises(DataError, match=r"URL scheme must be one of .*\(got '\w+'\)"):
            fetch(url, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def rows(server: Server, place: Path, *names: str) -> Path:
    return sets.lines(place / "a.jsonl", [{"file_name": f"{server.url}/{name}"} for name in names])


def test_rows_reach_named_hosts_only(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MULTIMODAL_CACHE", str(tmp_path / "cache"))
    data = rows(server, tmp_path, "good.png", "inside.png", "local.png", "metadata.png", "etc.png", "missing.png")
    report = validate(open_source(data, trust=Trust(remote=("127.0.0.1",))))
    causes = [fault.detail for fault in report.faults]
    assert [fault.name[-1] for fault in report.faults] == ["3", "4", "5", "6"]
    assert "leads to another host: URLs in a list are only fetched from named hosts" in causes[0]
    assert "--remote localhost allows it" in causes[0]
    assert "--remote 169.254.169.254 allows it" in causes[1]
    assert "leads to 'file:///etc/passwd', which is not read" in causes[2]
    assert "HTTP 404" in causes[3]
    assert validate(open_source(data, trust=Trust(remote=("127.0.0.1", "localhost")))).broken == 3
    monkeypatch.setenv("MULTIMODAL_CACHE", str(tmp_path / "another"))  # as no one asks again for what is there
    assert validate(open_source(data, trust=Trust(remote=(server.url.removeprefix("http://"),)))).broken == 4


def test_a_named_host_does_not_stand_for_an_internal_address(server, tmp_path, monkeypatch):
    """Whoever owns a name may let it stand for any address, another one at each look-up."""
    monkeypatch.setenv("MULTIMODAL_CACHE", str(tmp_path / "cache"))
    asked = web.socket.getaddrinfo
    monkeypatch.setattr(web.socket, "getaddrinfo", lambda host, *a, **b: asked("127.0.0.1", *a, **b))
    url = f"http://example.org:{server.server_port}/good.png"
    data = sets.lines(tmp_path / "a.jsonl", [{"file_name": url}])
    report = validate(open_source(data, trust=Trust(remote=("example.org",))))
    assert "example.org is the internal address 127.0.0.1; --remote example.org 127.0.0.1 allows it" in (
        report.faults[0].detail
    )
    assert server.asked == []
    assert validate(open_source(data, trust=Trust(remote=("example.org", "127.0.0.1")))).broken == 0


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("127.0.0.1", False), ("10.0.0.1", False),
        ("192.168.1.1", False), ("172.16.0.1", False), ("169.254.169.254", False), ("0.0.0.0", False),
        ("100.64.0.1", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False), ("::", False),
        ("fe80::1", False), ("fc00::1", False), ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", False),
        ("64:ff9b::7f00:1", False), ("64:ff9b::5db8:d822", True), ("2002:7f00:1::", False),
    ],
)  # fmt: skip
def test_internal_addresses(address, public):
    assert web._public(address) == public


def test_a_list_behind_a_url_reaches_what_lies_below_it(server, tmp_path, monkeypatch):
    data = b'{"file_name": "good.png"}\n{"file_name": "../good.png"}\n{"file_name": "http://127.0.0.1:9/x.png"}'
    monkeypatch.setattr(Handler, "sets", lambda self: self.answer(200, data if "jsonl" in self.path else sets.png(7)),
                        raising=False)  # fmt: skip
    monkeypatch.setenv("MULTIMODAL_CACHE", str(tmp_path))
    report = validate(open_source(f"{server.url}/sets/a.jsonl?sig=a/b"))
    assert [fault.name.rpartition(" ")[2] for fault in report.faults] == ["2", "3"]
    assert server.asked == ["/sets/a.jsonl?sig=a/b", "/sets/good.png"]


def test_gzip_bombs_are_given_up(tmp_path, monkeypatch):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(10_000_000)))
    monkeypatch.setattr(copies, "MOST", 1_000_000)
    with pytest.raises(DataError, match="too large"):
        shards.plain_tar(tmp_path / "a.tar.gz", tmp_path / "cache")


def test_members_that_are_too_large_for_memory_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "LARGEST", 1000)
    monkeypatch.setattr(shards, "LARGEST_SMALL", 100)
    data = sets.tar(tmp_path / "a.tar", [("a.png", bytes(1001)), ("b.png", sets.png(1)), ("b.txt", bytes(101)),
                                         ("c.png", sets.png(1))])  # fmt: skip
    source = open_source(data)
    assert [source.row(key).fault for key in range(3)] == [
        "a.png is too large (1001 bytes)", "b.txt is too large (101 bytes)", ""
    ]  # fmt: skip
