"""HTTP server: OpenAI's protocol for transcription, embeddings and chat, and our own for images and translation."""
