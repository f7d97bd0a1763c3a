"""infinity-emb with CLIP; transformers 5 gives outputs in place of features: ...infinity PORT FOLDER."""

import sys
from functools import wraps
from typing import Any

from infinity_emb.cli import cli
from transformers import CLIPModel


def projected(features: Any) -> Any:
    @wraps(features)
    def tensor(*args: Any, **options: Any) -> Any:
        found = features(*args, **options)
        return getattr(found, "pooler_output", found)

    return tensor


if __name__ == "__main__":
    for name in ("get_text_features", "get_image_features"):
        setattr(CLIPModel, name, projected(getattr(CLIPModel, name)))
    sys.argv = ["infinity_emb", "v2", "--port", sys.argv[1], "--model-id", sys.argv[2], "--served-model-name", "clip",
                "--host", "127.0.0.1", "--engine", "torch", "--device", "cpu", "--dtype", "float32"]  # fmt: skip
    cli()
