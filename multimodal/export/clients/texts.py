"""Transcribe or continue without torch: `python client.py SOUND.wav` or `python client.py TEXT`, beside the graphs."""

import json
import sys
import wave
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


class TextClient:
    def __init__(self, folder):
        self.own = json.loads((folder / "export.json").read_text())
        self.graphs = {name: onnxruntime.InferenceSession(folder / name) for name in self.own["graphs"]}
        self.tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.filters = np.load(folder / "mel.npy") if "audio" in self.own else None

    def run(self, graph, inputs):
        values = self.graphs[graph].run(None, {one.name: inputs[one.name] for one in self.graphs[graph].get_inputs()})
        return dict(zip((one.name for one in self.graphs[graph].get_outputs()), values, strict=True))

    def write(self, prompt, state=None, most=200):
        if len(prompt) >= self.own["context"]:
            raise ValueError(f"expected fewer tokens than the context of {self.own['context']} (got {len(prompt)})")
        graph, ids, step = "decoder_model.onnx" if state else "model.onnx", list(prompt), list(prompt)
        past = [one for one in self.graphs[graph].get_inputs() if one.name.startswith("past")]
        state = {one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in past} | (state or {})
        while len(ids) < min(len(prompt) + most, self.own["context"]):
            state |= {name.replace("present", "past_key_values"): value for name, value in state.items()}
            state |= {"input_ids": np.array([step]), "attention_mask": np.ones((1, len(ids)), np.int64)}
            state |= self.run(graph, state)
            state["logits"][0, -1, self.own["never"] + self.own["never_first"] * (len(ids) == len(prompt))] = -np.inf
            step = [int(state["logits"][0, -1].argmax())]
            if step[0] in self.own["ends"]:
                break
            ids += step
        return self.tokens.decode(ids[len(prompt) :])

    def complete(self, text):
        return self.write(self.own["before"] + self.tokens.encode(text, add_special_tokens=False).ids, most=100)

    def transcribe(self, path):
        with wave.open(str(path)) as file:
            channels, size, rate, count = file.getparams()[:4]
            if (channels, size, rate) != (1, 2, 16000) or not count:
                got = f"{rate} Hz, {channels} channels, {8 * size} bits, {count} samples"
                raise ValueError(f"expected a WAV file of 16000 Hz, 1 channel, 16 bits (got {got})")
            heard, own = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768, self.own["audio"]
        if own["frames"] and len(heard) > own["samples"]:
            most, got = own["samples"] / 16000, len(heard) / 16000
            raise ValueError(f"expected at most {most:g} seconds, the window of the model (got {got:.2f})")
        samples = np.pad(np.pad(heard, (0, max(0, own["samples"] - len(heard)))), own["edge"], "reflect")
        frames = np.lib.stride_tricks.sliding_window_view(samples, 400)[::160][: own["frames"]] * np.hanning(401)[:-1]
        log = np.log(np.maximum(abs(np.fft.rfft(frames, own["fft"])) ** 2 @ self.filters.T, own["floor"]))
        mel = ((np.maximum(log, log.max() - own["range"]) - own["mean"]) / own["scale"]).astype(np.float32)[None]
        mel[:, max(len(heard) // 160, 1) :] = 0
        if "prompt" in self.own:
            state = self.run("encoder_model.onnx", {"input_features": mel.mT})
            return self.write(self.own["prompt"], state, self.own["most"]).strip()
        logits = self.run("model.onnx", {"input_features": mel, "lengths": np.array([mel.shape[1]])})["logits"]
        best = logits[0].argmax(1)
        return self.tokens.decode(best[(best != np.append(-1, best[:-1])) & (best != self.own["blank"])]).strip()


if __name__ == "__main__":
    client = TextClient(Path(__file__).parent)
    if len(sys.argv) != 2:
        print("usage: client.py " + ("TEXT" if client.filters is None else "SOUND.wav"), file=sys.stderr)
        sys.exit(2)
    try:
        print(sys.argv[1] + client.complete(sys.argv[1]) if client.filters is None else client.transcribe(sys.argv[1]))
    except (ValueError, EOFError, OSError, wave.Error) as error:
        sys.exit(f"{sys.argv[1][:40]}: {error}")
