"""Options of exports."""

from multimodal.errors import UsageError
from multimodal.system.options import OptionSet, option

FLOATS = ("float32", "float16", "bfloat16")
# formats, and the number types of each
STORES = {"onnx": ("float32", "int8"), "hf": FLOATS, "ctranslate2": (*FLOATS, "int8"),
          "gguf": (*FLOATS, "int8")}  # fmt: skip


class ExportOptions(OptionSet):
    """Format and numbers of an export."""

    to: str = option("onnx", "format. onnx: graphs for ONNX Runtime, and a client without torch; hf: a folder that "
                     "transformers loads; ctranslate2: one that CTranslate2 and faster-whisper load; "
                     "gguf: a file for llama.cpp",
                     choices=tuple(STORES))  # fmt: skip
    store: str = option("float32", "number type of the weights: float32 or int8 for onnx, a float for hf, "
                        "a float or int8 for ctranslate2 and gguf",
                        choices=(*FLOATS, "int8"))  # fmt: skip
    overwrite: bool = option(False, "replace an existing export")

    def check(self) -> None:
        if self.store not in STORES[self.to]:
            raise UsageError(f"{self.store}: {self.to} has {', '.join(STORES[self.to])}", argument="store")
