"""The wheel, installed outside the checkout: it finds its models and does both main jobs."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from multimodal.inference.native import library
from multimodal.tokens.image import exact_resize
from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Unpack the wheel, as `pip install` would, away from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", folder / "built", ROOT], check=True, capture_output=True, timeout=300)
    (wheel,) = (folder / "built").glob("multimodal-*.whl")
    with zipfile.ZipFile(wheel) as held:
        held.extractall(folder / "installed")
    return folder


def run(place, *arguments):
    environment = os.environ | {"PYTHONPATH": str(place / "installed")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=place, env=environment, capture_output=True, text=True, timeout=300
    )


BOTH = """
import json, sys
import multimodal
from multimodal.cli.main import main
print(multimodal.__file__)
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, end.code
"""


@pytest.mark.ci
def test_the_wheel_does_both_main_jobs_away_from_the_checkout(place, tmp_path):
    import matplotlib.cbook

    image = matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    labels = ["military uniform", "goldfish", "school bus"]
    speech = str(ROOT / "assets" / "sample" / "speech.flac")
    jobs = [["classify", str(image), "--labels", *labels], ["transcribe", speech, "-o", str(tmp_path), "-f", "txt"]]
    done = run(place, "-c", BOTH, json.dumps(jobs))
    assert done.returncode == 0, done.stderr
    where, _, best, *_ = done.stdout.split("\n")
    assert Path(where).is_relative_to(place / "installed")
    assert best.endswith("military uniform")
    assert "two women are walking" in (tmp_path / "speech.txt").read_text()
    assert run(place, "-m", "multimodal", "--version").returncode == 0


@pytest.mark.ci
def test_the_wheel_holds_the_package_and_its_assets_alone(place):
    names = {path.relative_to(place / "installed").parts[0] for path in (place / "installed").rglob("*")}
    assert {name for name in names if not name.endswith(".dist-info")} == {"multimodal"}
    held = {path.name for path in (place / "installed" / "multimodal").rglob("*")}
    compiled = {path.name for path in (*library.SOURCES, exact_resize.SOURCE)}
    assert {"index.html", "transcribe.js", "style.css"} | compiled <= held
