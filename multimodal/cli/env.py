"""`multimodal env`: versions and machine, for a bug report."""

import platform
from argparse import Namespace

from multimodal import __version__
from multimodal.cli.parser import Parser

PACKAGES = ("torch", "torchvision", "torchaudio", "timm", "open_clip_torch", "av", "pillow", "tokenizers")


def add_flags(p: Parser) -> None:
    pass


def run(_: Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version  # slow: not for --help

    import torch

    print(f"multimodal {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"accelerator {device}; {torch.get_num_threads()} threads; CPU {torch.backends.cpu.get_cpu_capability()}")
    return 0
