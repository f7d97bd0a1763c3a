"""The command; see the package's docstring."""

import json
import sys
import traceback
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

from .device import ROOT, no_inference_mode, pretended_gpu  # noqa: E402

no_inference_mode()

from . import decoding, training  # noqa: E402


def told(error: BaseException) -> str:
    own = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(str(ROOT))]
    places = " < ".join(f"{Path(one.filename).relative_to(ROOT)}:{one.lineno}" for one in reversed(own[-3:]))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({places})"


def main() -> None:
    groups = {"train": training.scenarios(), "infer": decoding.scenarios()}
    for group, scenarios in groups.items():
        for part, run in scenarios:
            name = f"{group} {part}"
            if sys.argv[1:] and not any(one in name for one in sys.argv[1:]):
                continue
            raised = ""
            with pretended_gpu() as found:
                try:
                    run()
                except Exception as error:
                    raised = told(error)
                    if "-v" in sys.argv:
                        traceback.print_exc()
            print(json.dumps({"name": name, "raised": raised, "waits": found.found}), flush=True)


main()
