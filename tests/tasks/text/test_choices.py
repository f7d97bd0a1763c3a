"""Choices are ranked by the model's own log-probabilities of them."""

import pytest
import torch

from multimodal.errors import TextError
from multimodal.tasks.text.choices import Choice, checked_choices, scored
from multimodal.tasks.text.generate import TextWriter, prepared
from multimodal.tasks.text.options import options_for
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.weights.folder import Checkpoint
from tests.helpers.byte_models import byte_model
from tests.helpers.references import seq2seq as seq2seq_references


def choose(prompt: str, choices: list[str], model: Checkpoint, **options) -> list[Choice]:
    return scored(TextWriter(prepared(model, "auto", None), options_for(options)), prompt, checked_choices(choices))


def test_choices_are_ranked_by_the_models_own_log_probabilities():
    checkpoint, prompt = byte_model(), "one or "
    choices = ["two", "three", "a", "té"]
    found = choose(prompt, choices, checkpoint, length_penalty=0.5)
    for one in found:
        ids = torch.tensor([checkpoint.tokenizer.encode(prompt + one.text)])
        with torch.no_grad():
            logprobs = checkpoint.model(ids).log_softmax(-1)[0]
        at = len(prompt.encode())
        expected = logprobs[at - 1 : -1].gather(1, ids[0, at:, None]).sum().item()
        assert one.logprob == pytest.approx(expected, abs=1e-4)
        assert one.score == pytest.approx(expected / one.tokens**0.5, abs=1e-4)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    spaced = choose("one or", choices, checkpoint, length_penalty=0.5)
    assert [one.tokens for one in spaced] != [one.tokens for one in found]  # the space is a token of the choice
    made = seq2seq_references.case("Hugging Face T5")
    tokenizer = CharacterTokenizer("".join(chr(ord("a") + i) for i in range(59)))
    checkpoint = Checkpoint(made.family.load(made.tensors, made.config, "file").model, tokenizer)
    for one in choose("abc", ["xy", "z"], checkpoint):
        labels = torch.tensor([[0, *checkpoint.tokenizer.encode(one.text), 0]])
        with torch.no_grad():
            logits = made.reference(input_ids=torch.tensor([[0, 1, 2, 3, 0]]),
                                    decoder_input_ids=torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)
                                    ).logits  # fmt: skip
        expected = logits.log_softmax(-1)[0].gather(1, labels[0, :, None]).sum().item()
        assert one.logprob == pytest.approx(expected, abs=1e-4)


def test_a_choice_beyond_the_context_of_a_model_without_a_limit_is_told():
    endless = byte_model(40, "rotary")
    with pytest.warns(UserWarning, match="prompt: has 52 tokens with a choice, the model was trained on 40"):
        choose("abc", ["x" * 49, "y"], endless)
    with pytest.raises(TextError, match="beyond the context of 40"):
        choose("abc", ["x" * 49, "y"], byte_model())
