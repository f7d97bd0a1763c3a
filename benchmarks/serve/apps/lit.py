"""LitServe with our recognizer, in batches of 8: python -m benchmarks.serve.apps.lit PORT."""

import base64
import sys
from typing import Any

import litserve

import multimodal


class Recognizer(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = multimodal.Transcriber("asr-conformer-en", compute_type="float32", batch_size=8)

    def decode_request(self, request: dict[str, str]) -> bytes:
        return base64.b64decode(request["audio"])

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return inputs

    def predict(self, recordings: list[bytes]) -> list[str]:
        return [result["text"] for _, result in self.model.many(recordings, on_error="raise")]

    def unbatch(self, output: list[str]) -> list[str]:
        return output

    def encode_response(self, output: str) -> dict[str, Any]:
        return {"text": output}


if __name__ == "__main__":
    server = litserve.LitServer(Recognizer(max_batch_size=8, batch_timeout=0.01), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
