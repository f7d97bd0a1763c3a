"""`multimodal evaluate`: measure a model on labelled data."""

from multimodal.cli.parser import Parser, add_commands

KINDS = {
    "classification": ("evaluate.classification", "accuracy of a classifier of images, texts or tables"),
    "lm": ("evaluate.lm", "perplexity, last words, cloze choices and pronouns by a language model"),
    "translation": ("evaluate.translation", "BLEU and chrF of a translator"),
    "tagging": ("evaluate.annotated", "precision, recall and F1 of the entities that a tagger finds"),
    "qa": ("evaluate.annotated", "exact match and F1 of answers found in texts, as SQuAD's script"),
    "choice": ("evaluate.annotated", "accuracy of a multiple-choice model"),
    "noise": ("evaluate.noise", "share of generated noise that a Whisper model detects as no speech"),
    "asr": ("evaluate.asr", "word and character error rates of transcripts"),
    "zeroshot": ("evaluate.zeroshot", "zero-shot accuracy of a CLIP"),
    "retrieval": ("evaluate.retrieval", "recall of a CLIP between images and captions, in both directions"),
    "linear-probe": ("evaluate.linear_probe",
                     "accuracy of logistic regression on frozen features of a CLIP or ViT"),
    "few-shot": ("evaluate.few_shot", "linear probe with few images per class; for a CLIP also Tip-Adapter"),
    "answers": ("evaluate.answers", "accuracy of an any-to-text model's answers, by task"),
    "captions": ("evaluate.captions", "BLEU, ROUGE-L, CIDEr-D and CLIPScore of captions"),
}  # fmt: skip


def add_flags(p: Parser) -> None:
    add_commands(p, KINDS, "kind")
