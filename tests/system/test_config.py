"""Default models: environment, configuration file, shipped."""

import pwd
from pathlib import Path

import pytest
from PIL import Image

import multimodal
from multimodal.cli.main import main
from multimodal.errors import UsageError
from multimodal.inference.tune import remembered
from multimodal.system.assets import DEFAULT_MODELS, asset
from multimodal.system.config import config_file, default_model, is_on, source_of
from multimodal.system.files import cache_folder


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config_file().parent.mkdir()
    return config_file()


def test_environment_beats_file_beats_shipped(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_model("classify") == (DEFAULT_MODELS["classify"], "shipped")
    config.write_text('[classify]\nmodel = "siglip-base"\n[fill-mask]\nmodel = "bert"\n')
    assert default_model("classify") == ("siglip-base", str(config))
    assert default_model("fill-mask") == ("bert", str(config))
    assert default_model("transcribe").model == DEFAULT_MODELS["transcribe"]
    monkeypatch.setenv("MULTIMODAL_CLASSIFY_MODEL", "clip-vit-b-32")
    monkeypatch.setenv("MULTIMODAL_FILL_MASK_MODEL", "")  # as if not set
    assert source_of("clip-vit-b-32") == "MULTIMODAL_CLASSIFY_MODEL"
    assert source_of(DEFAULT_MODELS["transcribe"]) is None
    assert default_model("classify") == ("clip-vit-b-32", "MULTIMODAL_CLASSIFY_MODEL")
    assert default_model("fill-mask").model == "bert"


def test_switches_take_the_usual_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIMODAL_TUNE")
    assert is_on("MULTIMODAL_TUNE")
    for text, value in {"": True, "1": True, "Yes": True, "on": True, "0": False, "false": False, "NO ": False}.items():
        monkeypatch.setenv("MULTIMODAL_TUNE", text)
        assert is_on("MULTIMODAL_TUNE") is value
    monkeypatch.setenv("MULTIMODAL_TUNE", "never")
    with pytest.raises(UsageError, match=r"^MULTIMODAL_TUNE: expected 0 or 1 \(got 'never'\)$"):
        remembered("?", ["a"], "a", lambda: "a")


def test_a_user_without_home_has_the_shipped_models_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's user of a number alone."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MULTIMODAL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert default_model("classify") == (DEFAULT_MODELS["classify"], "shipped")
    with pytest.raises(UsageError, match="MULTIMODAL_CACHE"):
        cache_folder()
    monkeypatch.setenv("MULTIMODAL_CACHE", "cache")
    assert cache_folder() == Path("cache")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("MULTIMODAL_CACHE", "~/cache")
    assert cache_folder() == Path("/home/ada/cache")


def test_shipped_defaults_are_shipped() -> None:
    for name in filter(None, DEFAULT_MODELS.values()):
        assert asset(name).is_dir()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[classify]\nmodel = 3\n", "[classify] model: expected a name (got 3)"),
        ('[classify]\nmodel = ""\n', "[classify] model: expected a name (got '')"),
        ('[clasify]\nmodel = "a"\n', "[clasify]: unknown task, did you mean classify?"),
        ('[classify]\nname = "a"\n', "[classify] name: unknown key (known: model)"),
        ('classify = "a"\n', "classify: expected a table, [classify] (got 'a')"),
        ("[classify]\n", "[classify]: names no model"), ("[classify\n", "is not TOML"), ("\xff", "is not UTF-8 text"),
    ],
)  # fmt: skip
def test_bad_file_is_named_with_its_key(config: Path, text: str, told: str) -> None:
    config.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError) as error:
        default_model("classify")
    assert str(error.value).startswith(f"{config}: {told}")


def test_file_that_is_a_folder(config: Path) -> None:
    config.mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        default_model("classify")


def test_commands_and_objects_take_it(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config.write_text(f'[classify]\nmodel = "{tmp_path / "absent.safetensors"}"\n')
    Image.new("RGB", (8, 8)).save(tmp_path / "red.png")
    with pytest.raises(SystemExit) as stop:
        main(["classify", str(tmp_path / "red.png"), "--labels", "a,b"])
    err = capsys.readouterr().err
    assert (stop.value.code, err.count("\n"), "absent.safetensors': no such file" in err) == (1, 1, True)
    with pytest.raises(multimodal.MultimodalError, match=r"absent\.safetensors"):
        multimodal.Classifier(labels=["a", "b"])
