"""Rows of annotated texts in JSON lines, plain or gzip."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.data.manifests import read_text
from multimodal.errors import DataError
from multimodal.system.files import shown, strict_json


class AnnotatedRow(NamedTuple):
    where: str  # file and line
    values: dict[str, Any]

    def text(self, name: str) -> str:
        """A text that is not blank. Raises DataError."""
        if not isinstance(value := self.values.get(name), str) or not value.strip():
            raise DataError(f"{self.where}: {name} must be a text (got {shown(value)})")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts that are not blank. Raises DataError."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(one, str) and one.strip() for one in value):
            raise DataError(f"{self.where}: {name} must be a list of texts (got {shown(value)})")
        return value


def json_rows(path: Path) -> Iterator[AnnotatedRow]:
    """Raises DataError naming the line."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                values = strict_json(line.encode())
            except ValueError as error:
                raise DataError(f"{path}: line {number} is not JSON ({error})") from None
            if not isinstance(values, dict):
                raise DataError(f"{path}: line {number} is not a JSON object ({shown(values)})")
            yield AnnotatedRow(f"{path}: line {number}", values)


def not_empty(rows: Sequence[Any], path: Path) -> None:
    """Raise DataError for a file without rows."""
    if not rows:
        raise DataError(f"{path}: holds no text")
