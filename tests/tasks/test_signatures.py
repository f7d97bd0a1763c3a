"""Signatures that an editor completes repeat defaults, which the options declare."""

import inspect
from typing import get_args

import pytest

import multimodal
from multimodal.inference.options import BatchOptions, MachineOptions
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.options import OptionSet, option
from multimodal.tasks.caption.options import CaptionBatchOptions, CaptionOptions
from multimodal.tasks.classify.options import ClassifyOptions
from multimodal.tasks.text.options import (
    AnswerOptions,
    EmbedOptions,
    GenerateOptions,
    PromptOptions,
    TagOptions,
    TranslateOptions,
)
from multimodal.tasks.transcribe.options import RecognizerOptions, WhisperOptions
from multimodal.tokens.video.options import ClipOptions, VideoOptions

MACHINE = (MachineOptions,)
TAKEN = {
    multimodal.Classifier: (ClassifyOptions, BatchOptions, ClipOptions, *MACHINE),
    multimodal.Captioner: (CaptionOptions, CaptionBatchOptions, ClipOptions, *MACHINE),
    multimodal.Embedder: (EmbedOptions, BatchOptions, ClipOptions, *MACHINE),
    multimodal.Transcriber: (WhisperOptions, RecognizerOptions),
    multimodal.Translator: (TranslateOptions, *MACHINE),
    multimodal.Generator: (PromptOptions, *MACHINE),
    multimodal.Asker: (GenerateOptions, VideoOptions, *MACHINE),
    multimodal.Tagger: (TagOptions, *MACHINE),
    multimodal.Answerer: (AnswerOptions, *MACHINE),
    multimodal.prepare_for_inference: MACHINE,
}
OWN = {"model", "labels", "templates", "classifier", "urls", "source", "target", "native"}  # what no option declares
DIFFERS = {"normalize": True, "device": None}  # vectors from Python have length 1; a prepared model stays where it is


@pytest.mark.parametrize("made", TAKEN, ids=lambda made: made.__name__)
def test_defaults_are_those_of_the_options(made):
    declared = {name: own for options in reversed(TAKEN[made]) for name, own in options.declared.items()}
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            assert get_args(parameter.annotation)[0].__optional_keys__ <= declared.keys()
        elif name not in OWN and parameter.default is not parameter.empty:
            expected = declared[name].default
            assert parameter.default == expected or parameter.default is DIFFERS.get(name, expected), name


def test_every_public_object_is_held_to_its_options():
    loaded = {
        one for name in dir(multimodal) if inspect.isclass(one := getattr(multimodal, name)) and hasattr(one, "_queued")
    }
    assert loaded == TAKEN.keys() - {prepare_for_inference}


def test_annotations_made_when_asked_for_declare_options():
    """As those of Python 3.14, which do not stand in the namespace of their class."""

    class Late(type):
        __annotations__ = property(lambda cls: {"beams": int})

    class Options(OptionSet, metaclass=Late):
        beams = option(1)

    assert Options(beams=2).beams == 2
