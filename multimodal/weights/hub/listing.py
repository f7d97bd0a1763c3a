"""Models that `load` takes by name."""

from typing import Any

from multimodal.models.presets import PRESETS
from multimodal.system.assets import shipped
from multimodal.system.files import optional_json
from multimodal.weights.hub.registry import MODELS
from multimodal.weights.load import families


def list_models() -> dict[str, Any]:
    """List what `multimodal models --format json` prints: `shipped`, the summary of each shipped model by name;
    `public`, a dict of each public model (task, name, repository, parameters, licence …); `sizes`, the names of presets
    without weights; `formats`, those that `load` and `convert` take."""
    return {
        "shipped": {name: optional_json(path / "card.json").get("summary", "") for name, path in shipped().items()},
        "public": [model._asdict() for model in MODELS],
        "sizes": list(PRESETS),
        "formats": ["multimodal", *families()],
    }
