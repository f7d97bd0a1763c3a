"""Completions and relevance: what OpenAI's client, lm-eval and retrieval ask of texts."""

import httpx
import openai
import pytest
import torch
import transformers

import multimodal
from multimodal.system.assets import asset
from multimodal.weights.load import load


@pytest.fixture(scope="module")
def complete(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield lambda prompt="A man", **more: made.completions.create(model="gpt-mini", prompt=prompt, **more)


@pytest.mark.ci
def test_completions_are_the_librarys(complete, client):
    generator = multimodal.Generator("gpt-mini", compute_type="float32", temperature=0, max_new_tokens=6)
    prompts = ["A man", "Two dogs are"]
    ids = [generator.writer.ids(one) for one in prompts]
    expected = [one[0].text for one in generator.many(prompts)]
    for given in (prompts, ids):
        made = complete(given, max_tokens=6)
        assert [(one.index, one.text) for one in made.choices] == list(enumerate(expected))
    assert made.usage.prompt_tokens == sum(map(len, ids))
    assert complete(ids[0], max_tokens=6, echo=True).choices[0].text == prompts[0] + expected[0]
    chunks = [one.choices[0] for one in complete(max_tokens=6, echo=True, stream=True)]
    assert ("".join(one.text for one in chunks), chunks[-1].finish_reason) == (prompts[0] + expected[0], "length")
    events = client.post("/v1/completions", json={"prompt": "A man", "max_tokens": 1, "stream": True})
    assert events.headers["x-accel-buffering"] == "no"  # else nginx holds pieces back
    several = complete(prompts, n=2, seed=1, max_tokens=6).choices
    assert [one.index for one in several] == [0, 1, 2, 3]
    assert several[0].text != several[1].text


@pytest.mark.ci
def test_prompts_have_log_probabilities(complete):
    """They are those of one pass over all tokens, whose first one has none."""
    checkpoint, prompt = load("gpt-mini"), "A man in a café."
    ids = [checkpoint.tokenizer.bos_id, *checkpoint.tokenizer.encode(prompt)]
    with torch.inference_mode():
        logprobs = checkpoint.model.eval()(torch.tensor([ids]))[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for given in (prompt, ids):
        choice = complete(given, max_tokens=0, echo=True, logprobs=2).choices[0]
        told = choice.logprobs
        text = "".join(told.tokens).encode().decode("unicode_escape").encode("latin-1").decode()  # bytes are escaped
        assert (choice.text, text, told.token_logprobs[0]) == (prompt, prompt, None)
        torch.testing.assert_close(torch.tensor(told.token_logprobs[1:]), expected, atol=1e-4, rtol=0)
        best = [max(one.values()) for one in told.top_logprobs[1:]]
        torch.testing.assert_close(torch.tensor(best), logprobs[:-1].amax(1), atol=1e-4, rtol=0)
        for token, at in zip(told.tokens, told.text_offset, strict=True):
            assert prompt[at:].startswith(token) or "\\x" in token
    assert complete(ids, max_tokens=0, logprobs=1).choices[0].logprobs.tokens == []
    more = complete(ids, max_tokens=3, echo=True, logprobs=1).choices[0].logprobs
    assert more.token_logprobs[1 : len(ids)] == pytest.approx(told.token_logprobs[1:], abs=1e-4)
    alone = complete(ids, max_tokens=3, logprobs=0).choices[0].logprobs
    assert more.token_logprobs[len(ids) :] == pytest.approx(alone.token_logprobs, abs=1e-4)
    assert more.tokens[len(ids) :] == alone.tokens


@pytest.mark.parametrize(("given", "problem"), [
    ({"prompt": []}, "prompt: expected 1 to 2048 texts"), ({"prompt": [[1], []]}, "prompt[1]: is empty"),
    ({"prompt": [1 << 40]}, "prompt: 1099511627776 is not among the"), ({"prompt": [5] * 300}, "prompt: 300 tokens"),
    ({"best_of": 3}, "best_of: must be n, 1"), ({"prompt": ["a", "b"], "stream": True}, "prompt: must be one"),
    ({"prompt": "a" * 1_000_000}, "prompt: 1000000 characters"), ({"suffix": "end"}, "suffix"),
    ({"model": "any-mini"}, "any-mini: answers messages"),
])  # fmt: skip
def test_completions_that_are_refused(client, given, problem):
    answer = client.post("/v1/completions", json={"model": "gpt-mini", "prompt": "A man", "max_tokens": 0} | given)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


@pytest.mark.ci
@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_documents_by_relevance(serve, tmp_path, activation):
    """As sentence-transformers scores them: by a sigmoid, unless the model has another activation."""
    torch.manual_seed(0)
    tokenizer = transformers.BertTokenizer(str(asset("bert-mini", "vocab.txt")))
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=40, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    config.sentence_transformers = activation and {"activation_fn": activation}
    model = transformers.BertForSequenceClassification(config).eval()
    for one in (model, tokenizer):
        one.save_pretrained(tmp_path)
    query, documents = "a dog", ["two dogs run in a park", "a cat", "", "the dog"]
    with torch.inference_mode():
        logits = model(**tokenizer([query] * 4, documents, return_tensors="pt", padding=True)).logits[:, 0]
    expected = logits if activation else logits.sigmoid()
    url = f"{serve(models=(str(tmp_path),)).url}/v1/rerank"
    ask = lambda **more: httpx.post(url, json={"query": query, "documents": documents} | more, timeout=60).json()
    results = ask(return_documents=True)["results"]
    assert [one["index"] for one in results] == expected.argsort(descending=True).tolist()
    for one in results:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]].item(), abs=1e-5)
        assert one["document"] == {"text": documents[one["index"]]}
    assert ask(top_n=2, documents=[{"text": one} for one in documents])["results"] == [
        {name: one[name] for name in ("index", "relevance_score")} for one in results[:2]
    ]
    refused = ask(documents=["a", "dog " * 40])["error"]["message"]
    assert refused == "documents[1]: has 45 tokens with its question, beyond the context of 40"
