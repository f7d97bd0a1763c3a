"""`multimodal evaluate`: measure a model on data with known answers."""

from multimodal.cli.parser import Parser, add_commands

KINDS = {
    "classification": ("evaluate.classification", "accuracy of a classifier of images, texts or tables"),
    "text": ("evaluate.text", "perplexity and bits per byte of a language model"),
    "translation": ("evaluate.translation", "BLEU and chrF of a translator"),
    "noise": ("evaluate.noise", "how often a Whisper model takes noise for no speech"),
    "asr": ("evaluate.asr", "word and character error rates of transcripts"),
    "zeroshot": ("evaluate.zeroshot", "accuracy of a CLIP among the names of classes"),
    "retrieval": ("evaluate.retrieval", "recall of a CLIP between images and captions, both ways"),
    "linear-probe": ("evaluate.linear_probe",
                     "accuracy of logistic regression on the frozen features of a CLIP or a ViT"),
    "few-shot": ("evaluate.few_shot", "the same after few images a class; of a CLIP also Tip-Adapter"),
    "captions": ("evaluate.captions", "BLEU, ROUGE-L, CIDEr-D and CLIPScore of captions"),
}  # fmt: skip


def add_flags(p: Parser) -> None:
    add_commands(p, KINDS, "kind")
