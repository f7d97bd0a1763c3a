"""Good public checkpoints by name: what each is for, its licence, its parameters and a published figure."""

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from multimodal.system.assets import DEFAULT_MODELS
from multimodal.weights.hub.revisions import REVISIONS


class HubModel(NamedTuple):
    """`parameters`: as its authors state them, or counted from its configuration. `figure`: as published, with the
    source; empty where none is cited. `also`: other spellings."""

    task: str
    name: str
    repository: str
    parameters: str
    licence: str
    about: str
    figure: str = ""
    also: tuple[str, ...] = ()

    @property
    def revision(self) -> str:
        """Commit of the repository, or its main branch where none is recorded."""
        return REVISIONS.get(self.repository, "main")


MIT, APACHE, BY, NC = "MIT", "Apache-2.0", "CC-BY-4.0", "CC-BY-NC-4.0"
LIBRISPEECH = "% WER on LibriSpeech test-clean (model card)"
DISTIL = "% mean WER on short speech of other domains (card of distil-large-v3)"
CLIP = "% ImageNet zero-shot (Radford et al. 2021, table 11)"
LAION = "% ImageNet zero-shot (model card)"
COCO = "CIDEr on COCO captions, Karpathy test (Li et al. 2022, table 7)"
HELLASWAG = "% on HellaSwag (model card)"
MTEB = "mean over MTEB's 56 English datasets (card of bge-base-en-v1.5)"
BLEU = "BLEU on WMT14 English to German (Raffel et al. 2020, table 14)"
MODELS = [HubModel(task, *row) for task, rows in {
    "transcribe": [
        ("whisper-tiny", "openai/whisper-tiny", "39 M", APACHE, "multilingual; fastest", f"7.54 {LIBRISPEECH}"),
        ("whisper-tiny.en", "openai/whisper-tiny.en", "39 M", APACHE, "English alone"),
        ("whisper-base", "openai/whisper-base", "74 M", APACHE, "multilingual; quick", f"5.01 {LIBRISPEECH}"),
        ("whisper-base.en", "openai/whisper-base.en", "74 M", APACHE, "English alone"),
        ("whisper-small", "openai/whisper-small", "244 M", APACHE, "multilingual; good on a CPU",
         f"3.43 {LIBRISPEECH}"),
        ("whisper-small.en", "openai/whisper-small.en", "244 M", APACHE, "English alone"),
        ("whisper-medium", "openai/whisper-medium", "769 M", APACHE, "multilingual"),
        ("whisper-medium.en", "openai/whisper-medium.en", "769 M", APACHE, "English alone"),
        ("whisper-large-v2", "openai/whisper-large-v2", "1550 M", APACHE, "multilingual; wants a GPU"),
        ("whisper-large-v3", "openai/whisper-large-v3", "1550 M", APACHE, "best of Whisper; wants a GPU",
         f"8.4 {DISTIL}", ("whisper-large",)),
        ("whisper-large-v3-turbo", "openai/whisper-large-v3-turbo", "809 M", MIT,
         "large-v3 with 4 decoder layers: much faster; no translation", "", ("whisper-turbo",)),
        ("distil-small.en", "distil-whisper/distil-small.en", "166 M", MIT, "English; small and fast",
         f"12.1 {DISTIL}"),
        ("distil-medium.en", "distil-whisper/distil-medium.en", "394 M", MIT, "English", f"11.1 {DISTIL}"),
        ("distil-large-v3", "distil-whisper/distil-large-v3", "756 M", MIT, "English; fast", f"9.7 {DISTIL}"),
    ],
    "classify": [
        ("clip-vit-b-32", "openai/clip-vit-base-patch32", "151 M", MIT, "images against any labels; quick",
         f"63.2 {CLIP}", ("ViT-B-32", "ViT-B/32")),
        ("clip-vit-b-16", "openai/clip-vit-base-patch16", "150 M", MIT, "finer patches than B/32", f"68.6 {CLIP}",
         ("ViT-B-16", "ViT-B/16")),
        ("clip-vit-l-14", "openai/clip-vit-large-patch14", "428 M", MIT, "OpenAI's large model", f"75.3 {CLIP}",
         ("ViT-L-14", "ViT-L/14")),
        ("laion-vit-b-32", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "151 M", MIT, "trained on LAION-2B",
         f"66.6 {LAION}"),
        ("laion-vit-b-16", "laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "150 M", MIT, "trained on LAION-2B",
         f"70.2 {LAION}"),
        ("laion-vit-l-14", "laion/CLIP-ViT-L-14-laion2B-s32B-b82K", "428 M", MIT, "trained on LAION-2B",
         f"75.3 {LAION}"),
        ("siglip-base", "google/siglip-base-patch16-224", "203 M", APACHE,
         "English labels; scores are sigmoids",
         "76.2 % ImageNet zero-shot (Tschannen et al. 2025, table 1)", ("ViT-B-16-SigLIP",)),
        ("siglip2-base", "google/siglip2-base-patch16-224", "375 M", APACHE,
         "labels in many languages; scores are sigmoids",
         "78.2 % ImageNet zero-shot (Tschannen et al. 2025, table 1)", ("siglip2", "ViT-B-16-SigLIP2")),
    ],
    "caption": [
        ("blip-base", "Salesforce/blip-image-captioning-base", "224 M", "BSD-3-Clause", "captions of photographs",
         f"133.3 {COCO}", ("blip",)),
        ("blip-large", "Salesforce/blip-image-captioning-large", "446 M", "BSD-3-Clause",
         "captions, larger image tower", f"136.7 {COCO}"),
        ("coca-vit-b-32", "laion/mscoco_finetuned_CoCa-ViT-B-32-laion2B-s13B-b90k", "254 M", MIT,
         "captions and zero-shot labels", "", ("coca_ViT-B-32",)),
        ("coca-vit-l-14", "laion/mscoco_finetuned_CoCa-ViT-L-14-laion2B-s13B-b90k", "638 M", MIT,
         "captions and zero-shot labels", "", ("coca_ViT-L-14", "coca")),
    ],
    "generate": [
        ("gpt2", "openai-community/gpt2", "124 M", MIT, "English; continues a text",
         "29.41 perplexity on WikiText-2, zero-shot (model card)"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", "135 M", APACHE, "English; small", f"42.1 {HELLASWAG}",
         ("smollm2",)),
        ("smollm2-360m", "HuggingFaceTB/SmolLM2-360M", "360 M", APACHE, "English", f"54.5 {HELLASWAG}"),
        ("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B", "1.7 B", APACHE, "English; wants a GPU", f"68.7 {HELLASWAG}"),
    ],
    "fill-mask": [
        ("bert-base-uncased", "google-bert/bert-base-uncased", "110 M", APACHE, "English; base of many classifiers",
         "79.6 mean on GLUE's test sets, fine-tuned (model card)", ("bert", "bert-base")),
        ("distilbert-base-uncased", "distilbert/distilbert-base-uncased", "66 M", APACHE, "BERT in 6 layers",
         "77.0 mean on GLUE's dev sets, fine-tuned (Sanh et al. 2019)", ("distilbert",)),
    ],
    "tag": [
        ("bert-base-ner", "dslim/bert-base-NER", "108 M", MIT, "English people, places, organizations",
         "91.3 F1 on CoNLL-2003's test set (model card)"),
    ],
    "answer": [
        ("distilbert-squad", "distilbert/distilbert-base-cased-distilled-squad", "65 M", APACHE,
         "English questions about a text; fast", "87.1 F1 on SQuAD 1.1's dev set (model card)"),
        ("roberta-squad2", "deepset/roberta-base-squad2", "124 M", BY,
         "English; also says that a text has no answer", "82.9 F1 on SQuAD 2.0's dev set (model card)"),
    ],
    "embed": [
        ("minilm", "sentence-transformers/all-MiniLM-L6-v2", "22.7 M", APACHE, "English sentences; fastest"),
        ("bge-small-en", "BAAI/bge-small-en-v1.5", "33.4 M", MIT, "English search and similarity", f"62.17 {MTEB}"),
        ("bge-base-en", "BAAI/bge-base-en-v1.5", "109 M", MIT, "English search and similarity", f"63.55 {MTEB}"),
        ("e5-small", "intfloat/e5-small-v2", "33.4 M", MIT, "English; wants 'query: ' or 'passage: ' before texts",
         f"59.93 {MTEB}"),
        ("e5-base", "intfloat/e5-base-v2", "109 M", MIT, "English; wants 'query: ' or 'passage: ' before texts",
         f"61.5 {MTEB}"),
    ],
    "translate": [
        ("t5-small", "google-t5/t5-small", "60 M", APACHE, "English to German, French, Romanian", f"26.7 {BLEU}"),
        ("t5-base", "google-t5/t5-base", "220 M", APACHE, "English to German, French, Romanian", f"30.9 {BLEU}"),
        ("opus-mt-en-de", "Helsinki-NLP/opus-mt-en-de", "74 M", BY, "English to German"),
        ("opus-mt-de-en", "Helsinki-NLP/opus-mt-de-en", "74 M", APACHE, "German to English"),
        ("opus-mt-en-fr", "Helsinki-NLP/opus-mt-en-fr", "75 M", APACHE, "English to French"),
        ("opus-mt-fr-en", "Helsinki-NLP/opus-mt-fr-en", "75 M", APACHE, "French to English"),
        ("m2m100-418m", "facebook/m2m100_418M", "418 M", MIT, "between any two of 100 languages", "", ("m2m100",)),
        ("m2m100-1.2b", "facebook/m2m100_1.2B", "1.2 B", MIT, "between any two of 100 languages; wants a GPU"),
        ("nllb-600m", "facebook/nllb-200-distilled-600M", "600 M", NC, "between any two of 200 languages", "",
         ("nllb",)),
    ],
    "ask": [
        ("smolvlm-256m", "HuggingFaceTB/SmolVLM-256M-Instruct", "256 M", APACHE, "images and videos; runs on a CPU", "",
         ("smolvlm",)),
        ("smolvlm-500m", "HuggingFaceTB/SmolVLM-500M-Instruct", "507 M", APACHE, "images and videos; runs on a CPU"),
        ("llava-onevision-0.5b", "llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "894 M", APACHE,
         "images in tiles, videos as such", "", ("llava-onevision",)),
        ("llava-1.5-7b", "llava-hf/llava-1.5-7b-hf", "7.1 B", "Llama 2", "images; wants a GPU",
         "78.5 % on VQAv2 (Liu et al. 2023, Improved Baselines)", ("llava",)),
        ("idefics3-8b", "HuggingFaceM4/Idefics3-8B-Llama3", "8.5 B", APACHE, "images, pages, videos; wants a GPU", "",
         ("idefics3",)),
        ("qwen2-audio-7b", "Qwen/Qwen2-Audio-7B-Instruct", "8.4 B", APACHE, "speech and other sound; wants a GPU", "",
         ("qwen2-audio",)),
    ],
    "fine-tune": [
        ("bart-base", "facebook/bart-base", "139 M", APACHE, "English; a base for text-to-text tasks"),
    ],
}.items() for row in rows]  # fmt: skip

SAME = {"embed-images": "classify", "index": "classify", "noise": "transcribe"}  # tasks that take the same models
LEAST_LIKENESS, OWN_TASK = 0.4, 0.35  # of names, as difflib's ratio; what it counts for to be of the task

# of each shipped model: its parameters, and the registry's model for real use
DEMONSTRATIONS = {
    "clip-vit-16": ("4.6 M", "siglip-base"), "asr-conformer-en": ("3.6 M", "whisper-small"),
    "whisper-mini": ("2.0 M", "whisper-small"), "captioner-mini": ("4.0 M", "blip-base"),
    "sentence-mini": ("1.6 M", "bge-small-en"), "gpt-mini": ("2.6 M", "smollm2-360m"),
    "bert-mini": ("3.0 M", "bert-base-uncased"), "translator-mini": ("3.6 M", "m2m100-418m"),
    "any-mini": ("8.1 M", "smolvlm-256m"), "asr-lm-en": ("0.2 M", "smollm2-360m"),
}  # fmt: skip


def spellings() -> dict[str, HubModel]:
    """The registry's models by each of their names in lower case; Whisper's also by openai-whisper's, such as turbo."""
    named = {}
    for model in MODELS:
        for name in (model.name, model.repository, model.repository.rpartition("/")[2], *model.also):
            named[name.lower()] = named[name.lower().removeprefix("whisper-")] = model
    return named


def find(name: str) -> HubModel | None:
    return spellings().get(name.lower())


def near(name: str, others: Iterable[str], task: str | None = None) -> list[str]:
    """The three names of the registry, and of `others`, that are most like this one, best first; models of the task
    rank higher."""
    known = {other.lower(): other for other in (*(m.repository for m in MODELS), *(m.name for m in MODELS), *others)}
    task = SAME.get(task or "", task)
    own = {n.lower() for m in MODELS if m.task == task for n in (m.name, m.repository)} | {
        DEFAULT_MODELS.get(task or "")
    }
    matcher = difflib.SequenceMatcher(b=name.lower()[:80])
    ranked = []
    for other in known:
        matcher.set_seq1(other)
        if (likeness := matcher.ratio()) >= LEAST_LIKENESS:
            ranked.append((likeness + OWN_TASK * (other in own), other))
    return [known[other] for _, other in sorted(ranked, reverse=True)[:3]]
