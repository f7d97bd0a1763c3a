"""`multimodal env`: versions, machine and default models, for a bug report."""

import platform
from argparse import Namespace

from multimodal import __version__
from multimodal.cli.output import printable
from multimodal.cli.parser import Parser
from multimodal.system.assets import DEFAULT_MODELS
from multimodal.system.config import config_file, default_model

PACKAGES = ("torch", "torchvision", "torchaudio", "timm", "open_clip_torch", "av", "pillow", "tokenizers")

EXAMPLES = """examples:
  multimodal env
  MULTIMODAL_CLASSIFY_MODEL=siglip-base multimodal env
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES


def run(_: Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version  # slow: not for --help

    import torch

    print(f"multimodal {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    print(f"default models ({config_file()}{'' if config_file().exists() else ', which is not there'})")
    for task in DEFAULT_MODELS:
        if (found := default_model(task)) is None:
            print(f"  {task:<16} none")
        else:
            print(f"  {task:<16} {printable(found.model)} ({printable(found.source)})")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"accelerator {device}; {torch.get_num_threads()} threads; CPU {torch.backends.cpu.get_cpu_capability()}")
    return 0
