"""faster-whisper behind the simplest FastAPI: `… faster_whisper PORT FOLDER TOKENS THREADS`."""

import sys

import uvicorn
from fastapi import FastAPI, UploadFile
from faster_whisper import WhisperModel

from benchmarks.peers.speech.whisper_files import GREEDY

PORT, FOLDER, TOKENS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
app = FastAPI()
model = WhisperModel(FOLDER, "cpu", compute_type="float32", cpu_threads=int(sys.argv[4]))
# CTranslate2 halves the limit, after the four ids of the prompt were added
OPTIONS = GREEDY | {"beam_size": 1, "log_prob_threshold": None, "max_new_tokens": 2 * TOKENS - 4}


@app.post("/v1/audio/transcriptions")
def transcribe(file: UploadFile) -> dict[str, str]:
    segments, _ = model.transcribe(file.file, **OPTIONS)
    return {"text": "".join(one.text for one in segments)}


@app.get("/health")
def health() -> None:
    pass


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
