"""Models for other programs: ONNX graphs, Hugging Face folders, CTranslate2 and GGUF."""
