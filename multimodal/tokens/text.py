"""Text to tokens: every vocabulary of the project, and the one function that builds the right one."""

from multimodal.tokens.bytepair import BytePairTokenizer as BytePairTokenizer
from multimodal.tokens.tokenizer import TextBatch as TextBatch
from multimodal.tokens.tokenizer import TextCut as TextCut
from multimodal.tokens.tokenizer import Tokenizer as Tokenizer
