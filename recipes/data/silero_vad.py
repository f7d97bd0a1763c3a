"""Write assets/silero-vad/model.safetensors, the 16 kHz network of the installed package silero-vad 6 (MIT licence).

    pip install 'silero-vad~=6.2' && python recipes/data/silero_vad.py

Takes a second. The package's TorchScript archive is read as data. Its own safetensors file holds older weights, whose
probabilities differ by up to 0.4. tests/tasks/transcribe/test_vad.py holds the asset to the package, to the bit.
"""

import argparse
import importlib.metadata
from pathlib import Path

from safetensors.torch import save

from multimodal.weights.files.archives import read_archive

PARTS = {
    "stft.forward_basis_buffer": "spectrum.weight",
    **{f"encoder.{i}.reparam_conv.{kind}": f"convs.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")},
    **{f"decoder.rnn.{kind}": f"lstm.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    **{f"decoder.decoder.2.{kind}": f"head.{kind}" for kind in ("weight", "bias")},
}


def main() -> None:
    package = importlib.metadata.distribution("silero-vad")
    state = read_archive(Path(package.locate_file("silero_vad/data/silero_vad.jit")))
    tensors = {ours: state[f"_model.{theirs}"].contiguous() for theirs, ours in PARTS.items()}
    folder = Path(__file__).resolve().parents[2] / "assets" / "silero-vad"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(tensors, {"source": f"silero-vad {package.version}"}))
    (folder / "LICENCE").write_text(package.read_text("licenses/LICENSE"))
    print(f"{folder}: silero-vad {package.version}, {sum(t.numel() for t in tensors.values()):,} numbers")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
