"""Classify an image without torch: `python client.py IMAGE LABEL …`, without labels for a ViT, beside the graphs."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps
from tokenizers import Tokenizer


class ImageClient:
    def __init__(self, folder):
        self.own = json.loads((folder / "export.json").read_text())
        self.graphs = {name: onnxruntime.InferenceSession(folder / name) for name in self.own["graphs"]}
        self.tokens = Tokenizer.from_file(str(folder / "tokenizer.json")) if "templates" in self.own else None

    def run(self, graph, inputs):
        return self.graphs[graph].run(None, {one.name: inputs[one.name] for one in self.graphs[graph].get_inputs()})[0]

    def pixels(self, path):
        own, stored = self.own["image"], ImageOps.exif_transpose(Image.open(path))
        if stored.mode[0] in "IF":  # grey of 16 bits, or floats: white is the least of these that covers them
            grey, whites = np.asarray(stored), (1, 255, 65535) if stored.mode == "F" else (65535,)
            white = min(level for level in whites if grey.max() <= level)
            stored = Image.fromarray(np.rint(grey * (255 / white)).astype(np.uint8))
        image, stored = Image.new("RGB", stored.size, "white"), stored.convert("RGBA")
        image.paste(stored, mask=stored)
        (height, width), edges = own["size"], own["edges"]  # `edges`: before the crop
        if own["resize"] == "shortest":
            edges = [int(edges[0] * side / min(image.size)) for side in reversed(image.size)]
        image = image.resize(edges[::-1], Image.Resampling[own["interpolation"].upper()])
        before = {"round": round, "floor": int}[own["offset"]]
        left, top = before((image.width - width) / 2), before((image.height - height) / 2)
        rgb = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / 255
        return ((rgb - np.float32(own["mean"])) / np.float32(own["std"])).transpose(2, 0, 1)[None]

    def prompts(self, label):
        templates = self.own["templates"]
        if isinstance(templates, list):
            return [template.replace("{}", label) for template in templates]
        if label not in templates:
            raise ValueError(f"expected labels among {', '.join(templates)[:200]} (got {label!r})")
        return templates[label]

    def vector(self, label):
        """The mean of the label's prompts, cut to the context."""
        own, vectors = self.own, []
        room = own["context"] - len(own["before"] + own["after"])
        for prompt in self.prompts(label):
            ids = self.tokens.encode(prompt, add_special_tokens=False).ids
            if len(ids) > room:
                print(f"label {label[:40]!r} is cut to {own['context']} tokens", file=sys.stderr)
            ids = own["before"] + ids[:room] + own["after"]
            ids = np.array([ids + [own["pad"]] * (own["length"] - len(ids))])
            vectors.append(self.run("text_model.onnx", {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0])
        return np.mean(vectors, 0) / np.linalg.norm(np.mean(vectors, 0))

    def classify(self, path, labels=()):
        labels, inputs = [label.strip() for label in labels], {"pixel_values": self.pixels(path)}
        if not all(labels) or len(set(labels)) < len(labels):
            raise ValueError(f"expected labels that differ, none of them empty (got {labels})")
        if "model.onnx" in self.graphs:
            logits, labels = self.run("model.onnx", inputs)[0], self.own["labels"]
        else:
            logits = np.stack([self.vector(label) for label in labels]) @ self.run("vision_model.onnx", inputs)[0]
            logits = self.own["logit_scale"] * logits + self.own["logit_bias"]
        if self.own["scores"] == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        else:
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        return dict(sorted(zip(labels, scores.tolist(), strict=True), key=lambda pair: -pair[1]))


if __name__ == "__main__":
    client = ImageClient(Path(__file__).parent)
    if len(sys.argv) < 2 or (len(sys.argv) > 2) == ("labels" in client.own):
        print("usage: client.py IMAGE" + " LABEL ..." * ("labels" not in client.own), file=sys.stderr)
        sys.exit(2)
    try:
        for name, score in client.classify(sys.argv[1], sys.argv[2:]).items():
            print(f"{score:.4f} {name}")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow raises
        sys.exit(f"{sys.argv[1]}: {error}")
