"""Run a command in this process, and check its one line of error or its HTML page."""

import html.parser
import json
from pathlib import Path

import pytest

from multimodal.cli.main import main


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr without the line on a demonstration model."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    err = "".join(line for line in captured.err.splitlines(keepends=True) if ": demonstration model, " not in line)
    return stop.value.code or 0, captured.out, err


def one_line(err: str) -> str:
    assert err.startswith("multimodal: error: "), err
    assert err.count("\n") == 1, err
    return err


def evaluated(capsys, *arguments: object) -> dict:
    """The record that `evaluate` prints without an error."""
    code, out, err = run(capsys, "evaluate", *arguments, "--format", "json", "--quiet")
    assert (code, err) == (0, "")
    return json.loads(out)


class Page(html.parser.HTMLParser):
    """`tags` and `attributes` in their order; `text`: all that is read, without style and script."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.text, self._inside = [], [], "", ""
        self.feed(text)

    @classmethod
    def of(cls, path: Path) -> "Page":
        """A page in a file that loads nothing from elsewhere."""
        page = cls(path.read_text())
        for name, values in page.attributes:
            source = values.get("src", "data:")
            assert source.startswith("data:"), f"<{name} src={source[:80]}>"
            assert not any(key.startswith("on") for key in values), name
        assert "link" not in page.tags
        assert "url(" not in path.read_text()
        assert "://" not in path.read_text()
        return page

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data):
        if self._inside not in ("style", "script"):
            self.text += data
