"""What `multimodal caption` does with its flags."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from multimodal.commands_shared import found_files, in_batches, print_results
from multimodal.errors import ImageError
from multimodal.tasks.caption import caption as run
from multimodal.tokens.image import find_images
from multimodal.weights.load import load


def caption(options: Namespace) -> int:
    model = load(options.model, options.architecture)
    files, code = found_files(options.images, find_images)

    def captions(batch: list[Path]) -> list[dict[str, Any]]:
        return run(batch, model, beam_size=options.beam_size, max_tokens=options.max_tokens)

    results, failed = in_batches(files, captions, 16, ImageError)
    rows = ([r["file"], r["caption"], r["score"]] for r in results)
    print_results(results, rows, ["file", "caption", "score"], options.format)
    return code or failed
