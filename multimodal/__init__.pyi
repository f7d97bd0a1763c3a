"""The public names, for editors and type checkers; `__init__.py` imports them on first use."""

from multimodal.errors import MultimodalError as MultimodalError
from multimodal.inference.prepare import prepare_for_inference as prepare_for_inference
from multimodal.tasks.ask.asker import Asker as Asker
from multimodal.tasks.ask.asker import ask as ask
from multimodal.tasks.caption.caption import Captioner as Captioner
from multimodal.tasks.caption.caption import caption as caption
from multimodal.tasks.caption.caption import caption_many as caption_many
from multimodal.tasks.classify.classify import Classifier as Classifier
from multimodal.tasks.classify.classify import classify as classify
from multimodal.tasks.classify.classify import classify_many as classify_many
from multimodal.tasks.text.answer import Answerer as Answerer
from multimodal.tasks.text.answer import answer as answer
from multimodal.tasks.text.embedder import Embedder as Embedder
from multimodal.tasks.text.embedder import embed_many as embed_many
from multimodal.tasks.text.generate import Generator as Generator
from multimodal.tasks.text.generate import generate as generate
from multimodal.tasks.text.generate import generate_many as generate_many
from multimodal.tasks.text.tag import Tagger as Tagger
from multimodal.tasks.text.tag import tag as tag
from multimodal.tasks.text.translate import Translator as Translator
from multimodal.tasks.text.translate import translate as translate
from multimodal.tasks.transcribe.transcribe import Transcriber as Transcriber
from multimodal.tasks.transcribe.transcribe import transcribe as transcribe
from multimodal.tasks.transcribe.transcribe import transcribe_many as transcribe_many
from multimodal.weights.folder import Checkpoint as Checkpoint
from multimodal.weights.hub.listing import list_models as list_models
from multimodal.weights.load import load as load

__version__: str
