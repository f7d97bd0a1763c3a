"""Static decoding steps: equal to the dynamic ones in every search, at fixed addresses, with no wait for the device."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.stack import BlockConfig, StackConfig, transformer
from multimodal.decoding import logits as processors
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search
from multimodal.errors import UsageError
from multimodal.inference import cuda_graphs
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tasks.transcribe.options import WhisperOptions
from multimodal.tasks.transcribe.whisper import decode
from tests.helpers.spread import spread, thin
from tests.helpers.tiny_whisper import whispers

# openai-whisper leaves its vocabulary file open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PROMPTS = [[1], [2, 3, 4, 5, 6], [3, 4], [6, 5, 4, 3], [5, 1, 1], [2]]
LIMITS = [12, 8, 2, 5, 10, 1]


def decoder(heard=True, context=12, to=torch.float32):
    torch.manual_seed(4)
    config = transformer(16, 2, 2, 32, source_width=5 if heard else None)
    model = TextTransformer(TextConfig(7, context, config, causal=True, tied=False))
    with torch.no_grad():
        model.embed.weight.mul_(50)
        model.head.weight.mul_(4)
    return cuda_graphs.GraphDecoder(model.to(to).eval().requires_grad_(False))


def drawn(*args, **options):
    chance = [torch.Generator(args[1].device).manual_seed(number) for number in range(len(args[1]))]
    return sampling.sample(*args, temperature=1.0, generators=chance, copies=3, **options)


SEARCHES = {
    "greedy": sampling.greedy,
    "sample": drawn,
    "beam": partial(beam_search, beams=3),
}


class Recorder(TorchDispatchMode):
    """CUDA graph emulation on a CPU: replays the operations of one run on the same tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, made))
        return made

    def replay(self):
        for function, args, kwargs, made in self.calls:
            for old, new in zip(tree_leaves(made), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def replaying(monkeypatch):
    """Static steps on a CPU are recorded and replayed; the list of the recordings."""
    made = []

    def capture(slot, decoder):
        for _ in range(3):
            slot.forward(decoder)
        made.append(Recorder())
        with made[-1]:
            slot.logits = slot.forward(decoder)
        slot.graph = made[-1]

    monkeypatch.setattr(cuda_graphs, "REPLAYING", ("cpu", "cuda"))
    monkeypatch.setattr(cuda_graphs._Slot, "capture", capture)
    return made


def recorded(step, seen):
    def recording(ids, cache):
        logits = step(ids, cache)
        seen.append(logits.clone())
        return logits

    return recording


def compare(model, name, rows, device="cpu", tolerance=1e-5, masked=True, limits=LIMITS):
    """Both ways of one search over these prompts; how often the static step was called after the prompt."""
    ids, start = sampling.left_pad([PROMPTS[row] for row in rows], device)
    generator = torch.Generator().manual_seed(len(rows))
    source = valid = None
    if model.config.stack.block.cross is not None:
        source = torch.randn(len(rows), 9, 5, generator=generator).to(device, model.embed.weight.dtype)
        if masked:
            valid = (torch.arange(9) < torch.tensor([[9], [4], [7], [9], [1], [5]])[rows]).to(device)
    limits = [limits[row] for row in rows]
    pairs = (
        (lambda ids, cache: model(ids, source, valid, cache=cache), model.new_cache(start)),
        cuda_graphs.static_step(model, source, start, ids.shape[1] + max(limits), valid),
    )
    found, logits = [], []
    for step, cache in pairs:
        logits.append([])
        step = recorded(step, logits[-1])
        found.append(SEARCHES[name](step, ids, cache, eos=0, max_new=limits, processors=[processors.suppress([1])]))
    dynamic, static = found
    assert static.ids == dynamic.ids
    assert static.logprobs == pytest.approx(dynamic.logprobs, abs=10 * tolerance)
    for one, other in zip(*logits, strict=cache.generate is None):  # else of the prompt alone
        assert one.shape == other.shape
        assert (one - other).abs().max() <= tolerance
    return len(logits[1]) - 1, {len(one) for one in logits[1]}, found


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", SEARCHES)
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("heard", [False, True])
def test_static_steps_find_what_dynamic_ones_find(name, heard):
    model, ended = decoder(heard), 0
    for rows in ([0, 1, 2, 3, 4, 5], [1, 4, 0], [3], [4, 3, 2, 1, 0]):
        steps, sizes, (found, _) = compare(model, name, rows)
        longest = [LIMITS[row] for row in rows for _ in range(len(found.ids) // len(rows))]
        ended += sum(len(ids) < most for ids, most in zip(found.ids, longest, strict=True))
        if len(rows) == 6:
            assert steps > 8
            assert len(sizes) > 1  # those that end first are left out
    assert ended > 1


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", SEARCHES)
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("heard", [False, True])
def test_replayed_operations_find_what_dynamic_steps_find(name, heard, replaying):
    model = decoder(heard)
    for rows in ([0, 1, 2, 3, 4, 5], [1, 4, 0], [3], [0, 5], [5, 5], [4, 3, 2, 1, 0]):
        compare(model, name, rows)
    sizes = {slot.shapes[:2] for slot in model.slots}
    assert len(replaying) == len(model.slots) == len(sizes) < 6  # 5 and 6 prompts share one, 2 and 2 as well
    assert all(len(one.calls) > 50 for one in replaying)


def test_where_a_capture_fails_decoding_goes_on_and_says_so(replaying, monkeypatch):
    def capture(slot, decoder):
        slot.forward(decoder)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graphs._Slot, "capture", capture)
    with pytest.warns(UserWarning, match="continues without a CUDA graph: operation not permitted when .* capturing$"):
        compare(decoder(), "greedy", [0, 1, 2])


def test_half_precision_and_a_source_without_a_mask():
    compare(decoder(to=torch.bfloat16), "greedy", [0, 1, 2], tolerance=0.05)
    compare(decoder(), "greedy", [0, 1, 2], masked=False)
    compare(decoder(), "greedy", [0, 5], masked=False, limits=[12] * 6)  # no padding, and the whole context


def test_addresses_and_shapes_stay_and_batches_of_like_size_share_them():
    model = decoder()
    source, prompt = torch.randn(4, 9, 5), torch.tensor([[1], [2], [3], [4]])

    def run(count):
        step, cache = cuda_graphs.static_step(model, source[:count], None, 20)
        step(prompt[:count], cache)
        seen = set()
        for _ in range(4):
            step(prompt[:count], cache)
            held = cache.slot
            layers = [x for one in held.self_attention + held.cross_attention for x in (one.key, one.value)]
            seen.add(tuple(x.data_ptr() for x in [*layers, held.at, held.start, cache.slot.ids]))
            cache.reorder_rows(torch.arange(count).flip(0))
        assert len(seen) == 1
        assert held.self_attention[0].key.shape == (4, 2, 64, 8)
        return seen, cache

    first, cache = run(3)
    second, other = run(4)
    assert first != second  # the first cache still lives in its slot
    del cache
    assert run(4)[0] == first
    del other
    assert run(3)[0] <= first | second


def test_what_a_batch_leaves_behind_does_not_reach_the_next():
    model = decoder()
    compare(model, "greedy", [0, 1, 2])
    for slot in model.slots:
        for layer in slot.self_attention + slot.cross_attention:
            layer.key.fill_(torch.nan)
            layer.value.fill_(torch.nan)
    compare(model, "greedy", [0, 1, 2])
    assert len(model.slots) == 1


@pytest.mark.ci
def test_a_decoder_keeps_a_few_slots_and_nothing_keeps_the_decoder():
    model = decoder()
    for rows in range(1, 7):
        for capacity in (10, 100, 200):
            step, cache = cuda_graphs.static_step(model, torch.randn(rows, 9, 5), None, capacity)
            for _ in range(2):
                step(torch.ones(rows, 1, dtype=torch.long), cache)
    assert len(model.slots) == cuda_graphs.KEPT
    gone = weakref.ref(model)
    del model, step, cache
    gc.collect()
    assert gone() is None


def test_a_full_room_and_a_full_context_are_refused():
    model = decoder()
    for context, capacity in ((12, 12), (12, 500)):
        step, cache = cuda_graphs.static_step(model, torch.randn(1, 9, 5), None, capacity)
        for _ in range(context):
            step(torch.tensor([[1]]), cache)
        with pytest.raises(ValueError, match="1 ids after 12 positions: one at a time, 12 at most"):
            step(torch.tensor([[1]]), cache)
    step, cache = cuda_graphs.static_step(decoder(context=100), torch.randn(1, 9, 5), None, 60)
    step(torch.ones(1, 60, dtype=torch.long), cache)
    for _ in range(4):
        step(torch.tensor([[1]]), cache)
    with pytest.raises(ValueError, match="1 ids after 64 positions"):
        step(torch.tensor([[1]]), cache)
    relative = StackConfig(BlockConfig(AttentionConfig(16, 2, relative=True), 32), 1)
    with pytest.raises(ValueError, match="relative"):
        cuda_graphs.GraphDecoder(TextTransformer(TextConfig(7, 12, relative, causal=True)))


def test_weights_of_a_decoder_with_graphs_stay_where_they_are():
    """A graph reads them by their address."""
    with pytest.raises(UsageError, match="frozen"):
        decoder().to(torch.float64)


RULES = [
    [processors.suppress([1]), processors.suppress_first([2], 3), processors.timestamps(4, 0, 3, 3, 1)],
    [processors.timestamps(4, 0, 3, 3)],
    [processors.suppress_first([0], 3, 4), processors.end_if_all_forbidden(0)],
    [processors.force([2], 4), processors.no_repeat_ngram(2), processors.end_if_all_forbidden(0)],
    [processors.repetition_penalty(1.5)],
    [processors.Penalties(0.5, 2.0, ((5, 1.5),)).processor(3), processors.no_repeat_ngram(1)],
    [],
]
CASES_OF_RULES = [(padded, name) for padded in (False, True) for name in SEARCHES]
FREE = [[processors.suppress([1]), lambda ids, logits: logits], [processors.suppress_first([2], 4)]]


@pytest.mark.parametrize(("padded", "name"), spread(CASES_OF_RULES, 5, pytest.mark.slow, pytest.mark.ci))
def test_processors_inside_of_a_replayed_search_are_those_outside(name, padded, replaying):
    """And rows that end; a processor without such a form, or made for another prompt, leaves the search outside."""
    model, ids = decoder(context=40), torch.tensor([[1, 2, 3], [4, 5, 6], [6, 6, 2], [3, 1, 5]])
    source = torch.randn(4, 9, 5, generator=torch.Generator().manual_seed(5))
    start = torch.tensor([0, 2, 1, 0]) if padded else None
    for number, chosen in enumerate(RULES + FREE):
        found, calls = [], []
        for step, cache in (
            (lambda ids, cache: model(ids, source, cache=cache), model.new_cache(start)),
            cuda_graphs.static_step(model, source, start, 40),
        ):
            calls.append([])
            counted = lambda *given, step=step, calls=calls[-1]: calls.append(1) or step(*given)
            found.append(SEARCHES[name](counted, ids, cache, eos=[0, 5], max_new=[30, 9, 2, 21], processors=chosen))
        dynamic, static = found
        assert static.ids == dynamic.ids, number
        assert static.logprobs == pytest.approx(dynamic.logprobs, abs=1e-4), number
        assert (len(calls[1]) == 1 < len(calls[0])) == (number < len(RULES)), number
    step, cache = cuda_graphs.static_step(model, source, None, 40)
    cache.capacity = 35
    with pytest.raises(ValueError, match="35 at most"):
        SEARCHES[name](step, ids, cache, eos=-1, max_new=36, processors=[processors.suppress([1])])


@pytest.mark.ci
def test_a_replayed_draw_is_narrowed_and_tempered_as_outside(replaying):
    """A filter of one's own leaves the search outside; other temperatures and filters have graphs of their own."""
    model, ids = decoder(context=40), torch.tensor([[1, 2, 3], [4, 5, 6]])
    source = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(5))
    narrows = [processors.SamplingFilter(3, 0.7), processors.SamplingFilter(min_p=0.3), lambda logits: logits]
    seen = set()
    for temperature, narrow in [(0.5, None), (2.0, None), *((2.0, narrow) for narrow in narrows)]:
        found, calls = [], []
        for step, cache in (
            (lambda ids, cache: model(ids, source, cache=cache), model.new_cache()),
            cuda_graphs.static_step(model, source, None, 40),
        ):
            calls.append([])
            counted = lambda *given, step=step, calls=calls[-1]: calls.append(1) or step(*given)
            chance = [torch.Generator().manual_seed(number) for number in range(2)]
            found.append(sampling.sample(counted, ids, cache, eos=0, max_new=12, temperature=temperature, copies=4,
                                         generators=chance, narrow=narrow))  # fmt: skip
        dynamic, static = found
        assert static.ids == dynamic.ids
        assert static.logprobs == pytest.approx(dynamic.logprobs, abs=1e-4)
        assert (len(calls[1]) == 1) == (narrow is not narrows[2])
        seen.add(str(static.ids))
    assert len(seen) >= 4
    assert len(replaying) == 5


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_can_be_interrupted_before_each_step(name, replaying):
    model, ids = decoder(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    source = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(5))
    ways = ((lambda ids, cache: model(ids, source, cache=cache), model.new_cache()),
            cuda_graphs.static_step(model, source, None, 12))  # fmt: skip
    for step, cache in ways:
        left = [1] * 4
        with pytest.raises(IndexError):
            SEARCHES[name](step, ids, cache, eos=-1, max_new=9, interrupt=left.pop)
        assert cache.length == 3 + 3


def test_a_cut_forgets_positions():
    model, source = decoder(), torch.randn(1, 9, 5)
    step, cache = cuda_graphs.static_step(model, source, None, 12)
    for token in (1, 2, 3, 4):
        last = step(torch.tensor([[token]]), cache).clone()
    cache.cut(2)
    step(torch.tensor([[3]]), cache)
    assert cache.length == 3
    assert (step(torch.tensor([[4]]), cache) - last).abs().max() < 1e-6


@pytest.mark.ci
def test_greedy_decoding_asks_the_device_for_nothing_before_the_pause():
    """On the meta device each look at a value is an error, as it is a wait on an accelerator."""
    model, seen = decoder(context=40, to="meta"), []
    prompt = torch.ones(2, 3, dtype=torch.long, device="meta")
    step, cache = cuda_graphs.static_step(model, torch.empty(2, 9, 5, device="meta"), None, 20)
    limits = [processors.suppress([1]), processors.suppress_first([2], 3), processors.timestamps(4, 0, 3, 3)]
    with pytest.raises(NotImplementedError, match="meta"):
        sampling.greedy(recorded(step, seen), prompt, cache, eos=0, max_new=20, processors=limits)
    assert len(seen) == sampling.CHECK_EVERY


@pytest.mark.ci
@pytest.mark.parametrize(("temperature", "beam_size"), [(0.0, None), (0.8, None), (0.0, 3)])
def test_whisper_windows_are_decoded_alike_after_long_and_short_texts(temperature, beam_size, request):
    _, checkpoint = whispers()
    features = [torch.randn(1500, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    previous = [[], [400, 500, 600, 700, 800], [900], list(range(300, 330))]
    options = WhisperOptions(sample_len=16, beam_size=beam_size, best_of=2)
    requests = [decode.Decode(*pair, "en", temperature, 7) for pair in zip(features, previous, strict=True)]
    dynamic = decode.decode(checkpoint, options, requests)
    recordings = request.getfixturevalue("replaying")
    static = decode.decode(prepare_for_inference(checkpoint, "float32"), options, requests)
    assert len(recordings) == 1
    for one, other in zip(static, dynamic, strict=True):
        assert one.tokens == other.tokens
        assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEARCHES)
def test_graphs_find_what_dynamic_steps_find(name):
    model = decoder(context=64, to="cuda")
    for rows in ([0, 1, 2, 3, 4, 5], [3], [0, 5], [0, 1, 2, 3, 4, 5]):
        compare(model, name, rows, "cuda", tolerance=1e-4, limits=[12, 8, 2, 5, 10, 30])
        assert model.slots[-1].graph is not None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@torch.inference_mode()
def test_a_replayed_step_and_the_processors_never_wait_for_the_device():
    model = decoder(context=64, to="cuda")
    source, ids = torch.randn(2, 9, 5, device="cuda"), torch.ones(2, 1, dtype=torch.long, device="cuda")
    step, cache = cuda_graphs.static_step(model, source, None, 40)
    limits = [processors.suppress([1]), processors.suppress_first([2], 1), processors.timestamps(4, 0, 3, 1)]
    for _ in range(2):  # prompt, capture
        sampling.next_logits(step, ids, cache, ids.repeat(1, 3), limits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            sampling.next_logits(step, ids, cache, ids.repeat(1, 3), limits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
