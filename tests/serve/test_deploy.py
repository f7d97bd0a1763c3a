"""Deployments name flags that the server has."""

import re

import pytest

from multimodal.errors import UsageError
from multimodal.serve.options import ServeOptions
from tests.helpers.paths import ROOT


@pytest.mark.parametrize("name", ["Dockerfile", "multimodal.service"])
def test_flags_of_deployments_are_the_servers(name):
    text = (ROOT / "deploy" / name).read_text()
    (line,) = re.findall(r"^(?:ENTRYPOINT|ExecStart).*serve.*$", text, re.MULTILINE)
    flags = re.findall(r"--([a-z_]+)", line + "".join(re.findall(r"^CMD.*$", text, re.MULTILINE)))
    assert set(flags) == {"host", "port", "api_key_file"} <= ServeOptions.declared.keys()


def test_keys_come_from_a_file(tmp_path):
    (tmp_path / "keys").write_text("first\nsecond\n")
    assert ServeOptions(host="0.0.0.0", api_key_file=str(tmp_path / "keys")).known_keys() == ("first", "second")
    (tmp_path / "none").touch()
    for name, part in (("none", "has no key"), ("gone", "cannot be read")):
        with pytest.raises(UsageError, match=part):
            ServeOptions(api_key_file=str(tmp_path / name))
