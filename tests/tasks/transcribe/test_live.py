"""Streaming: the chunked encoder, and live transcription of PCM."""

import io
import itertools
import os
import threading
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.errors import AudioError, UsageError
from multimodal.models.conformer import ConformerCTC, ConformerEncoder, ConformerEncoderConfig
from multimodal.system.assets import asset
from multimodal.tasks.transcribe import live
from multimodal.tasks.transcribe.conformer.decode import decode_windows
from multimodal.tasks.transcribe.conformer.recognizer import ChunkedRecognizer, RedecodingRecognizer
from multimodal.tasks.transcribe.options import LiveOptions, SpeechDecodingOptions, options_for
from multimodal.tasks.transcribe.transcribe import transcribe
from multimodal.tokens.audio.pcm import PcmReader
from multimodal.tokens.audio.reading import TruncatedAudio, read_audio
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train.objectives.recognizer import joint_config
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load
from tests.helpers.data.sets import wav
from tests.helpers.processes.programs import wait_for
from tests.helpers.spread import thin
from tests.helpers.tiny import randomized
from tests.helpers.tiny_whisper import COMMON, THEIR_WARNINGS, sound, whispers

pytestmark = THEIR_WARNINGS
RATE = 16000
SAMPLE = asset("sample", "speech.flac")


def encoder(
    subsample=4, rotary=False, relative=False, left=0, chunk=4, kernel=7, conv_norm="layer", conv_first=False,
    dynamic=False,
):  # fmt: skip
    attention = AttentionConfig(16, 2, relative=relative)
    block = ConformerConfig(attention, 24, kernel, conv_norm, conv_first=conv_first, conv_causal=True)
    bands = 16 if subsample == 1 else 11
    config = ConformerEncoderConfig(
        bands, block, 3, subsample, 4, rotary=rotary, chunk=chunk, left=left, dynamic=dynamic
    )
    return randomized(ConformerEncoder(config)).eval()


@pytest.mark.parametrize("options", [
    {"subsample": 1, "rotary": True}, {"subsample": 2, "relative": True}, {"rotary": True},
    {"subsample": 8, "rotary": True}, {"rotary": True, "left": 5}, {"relative": True, "left": 8, "chunk": 3},
    {"kernel": 1, "conv_norm": "batch", "conv_first": True},
])  # fmt: skip
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("frames", [1, 50, 61])
def test_an_encoders_stream_equals_the_whole(options, frames):
    model = encoder(**options)
    features = torch.randn(2, frames, model.config.bands)
    with torch.no_grad():
        whole, lengths = model(features, torch.tensor([frames, frames]))
    for sizes in ([frames], [1, 1, 1, 1, 1, 25, 0, 3, frames]):
        stream, done = model.stream(), []
        for part in features.split_with_sizes([*_filled(sizes, frames)], 1):
            done.append(stream.push(part))
        early = sum(part.shape[1] for part in done)
        done.append(stream.push(features[:, :0], last=True))
        assert torch.cat(done, 1).shape == (2, lengths[0], 16)
        assert_close(torch.cat(done, 1), whole, atol=1e-5, rtol=0)
        # it waits for no more than one frame of each halving and an unfilled chunk
        assert early == (frames // model.config.subsample) // model.config.chunk * model.config.chunk


def _filled(sizes, total):
    """Sizes that sum up to `total`."""
    left = total
    for size in sizes:
        yield min(size, left)
        left -= min(size, left)


def test_only_a_chunked_encoder_has_a_stream():
    with pytest.raises(ValueError, match="chunks"):
        encoder(chunk=0).stream()


def test_a_dynamic_encoder_sees_the_whole_and_streams_in_chunks():
    whole, chunks, dynamic = encoder(chunk=0), encoder(left=5), encoder(left=5, dynamic=True)
    for model in (whole, chunks):
        model.load_state_dict(dynamic.state_dict())
    features, lengths = torch.randn(2, 61, 11), torch.tensor([61, 40])
    with torch.no_grad():
        as_whole, as_chunks = (model(features, lengths)[0] for model in (whole, chunks))
        assert_close(dynamic(features, lengths)[0], as_whole, atol=0, rtol=0)
        assert_close(dynamic.stream().push(features[:1], last=True), as_chunks[:1], atol=1e-5, rtol=0)
        drawn = [dynamic.train()(features, lengths)[0] for _ in range(20)]
    kinds = [(one - as_chunks).abs().max() < (one - as_whole).abs().max() for one in drawn]
    assert 6 < sum(kinds) < 20  # most of the training


def pcm(wave):
    return (wave * 32768).round().clamp(-32768, 32767).to(torch.int16).numpy().tobytes()


def lines(data, checkpoint, read=None, **options):
    """Partials, finals and figures."""
    events = list(live.run(read or io.BytesIO(data).read1, checkpoint, LiveOptions(**options)))
    assert [event.kind for event in events].count("summary") == 1
    assert events[-1].kind == "summary"
    kinds = (tuple(event for event in events if event.kind == kind) for kind in ("partial", "final"))
    return *kinds, events[-1].figures


@pytest.fixture(scope="module")
def shipped():
    return load("asr-conformer-en")


@pytest.fixture(scope="module")
def chunked():
    tokenizer = BytePairTokenizer.train(["the cat sat on the mat", "a dog ran over the hill"], 270)
    torch.manual_seed(0)
    model = ConformerCTC(joint_config(tokenizer.vocab_size, 16, 2, 1, 100, 0.0, chunk=4, left=8)).eval()
    with torch.no_grad():
        model.ctc.weight.mul_(8)
        model.ctc.bias[-1] += 3
    return Checkpoint(model, tokenizer, source="chunked")


@pytest.mark.ci
def test_finals_of_the_sample_are_its_transcript(shipped):
    wave = read_audio(SAMPLE)
    partials, finals, figures = lines(pcm(wave), shipped, step=2.0)
    assert " ".join(line.text for line in finals) == transcribe(SAMPLE, shipped)["text"]
    assert len(finals) >= 2
    for before, line in itertools.pairwise(finals):
        assert 0 <= before.start < before.end <= line.start < line.end <= len(wave) / RATE
    assert figures["seconds"] == pytest.approx(len(wave) / RATE, abs=1e-3)
    assert figures["finals"] == len(finals)
    assert figures["partials"] == len(partials)
    assert 0 < figures["final_latency_p50"] <= figures["final_latency_p95"] <= figures["latency_max"]


def test_partials_grow_into_the_final(shipped, monkeypatch):
    monkeypatch.setattr(PcmReader, "waiting", lambda _: 0.0)  # as on a machine that keeps pace
    wave = read_audio(SAMPLE)[: 3 * RATE]
    partials, (final,), _ = lines(pcm(wave), shipped, step=0.3)
    assert len(partials) >= 3
    for before, line in itertools.pairwise(partials):
        agreed = line.stable.split()
        assert before.text.split()[: len(agreed)] == line.text.split()[: len(agreed)] == agreed
    assert len(partials[-1].stable.split()) >= 3
    assert final.stable == final.text
    assert final.text.split()[:3] == partials[-1].text.split()[:3]


@pytest.mark.ci
def test_a_slow_machine_shows_the_first_partial_of_each_utterance(shipped, monkeypatch):
    monkeypatch.setattr(PcmReader, "waiting", lambda _: 9.0)
    wave = read_audio(SAMPLE)[: round(3.4 * RATE)]
    events = list(live.run(io.BytesIO(pcm(torch.cat([wave, torch.zeros(RATE), wave]))).read1, shipped))
    assert [event.kind for event in events] == ["partial", "final"] * 2 + ["summary"]
    assert all(event.text for event in events[:4])


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("size", [3200, 777])
def test_a_chunked_models_lines_are_its_offline_text(chunked, size):
    """All is speech, so utterances are cut when they are full; one is as long as the sound."""
    wave, decode = read_audio(SAMPLE)[: round(4.21 * RATE)], SpeechDecodingOptions(beam_size=1, logprob_threshold=None)
    wave = torch.frombuffer(bytearray(pcm(wave)), dtype=torch.int16) / 32768
    source = io.BytesIO(pcm(wave))
    _, (final,), _ = lines(b"", chunked, lambda _: source.read(size), threshold=0.0, decode=decode)
    (decoded,) = decode_windows([wave], chunked, decode)
    assert final.text == " ".join(chunked.tokenizer.decode(decoded.ids).split()) != ""
    _, short, _ = lines(pcm(wave), chunked, threshold=0.0, decode=decode, longest=2.0)
    assert len(short) >= 3
    assert all(before.end <= line.start for before, line in itertools.pairwise(short))


def test_a_dynamic_models_finals_are_its_offline_text(chunked):
    config = joint_config(chunked.tokenizer.vocab_size, 16, 2, 1, 100, 0.0, chunk=4, left=8, dynamic=True)
    model = ConformerCTC(config).eval()
    model.load_state_dict(chunked.model.state_dict())
    dynamic, wave = Checkpoint(model, chunked.tokenizer, source="dynamic"), torch.randn(21000) * 0.1
    recognizer = ChunkedRecognizer(dynamic, SpeechDecodingOptions())
    partial = recognizer.partial(wave[:16000])
    (whole,) = decode_windows([wave], dynamic, SpeechDecodingOptions())
    assert recognizer.final(wave).ids == whole.ids
    assert partial.ids == ChunkedRecognizer(chunked, SpeechDecodingOptions()).partial(wave[:16000]).ids


@pytest.mark.ci
def test_chunks_give_the_partials_of_the_whole_so_far(chunked):
    wave, options = read_audio(SAMPLE)[: 2 * RATE], SpeechDecodingOptions(beam_size=3, logprob_threshold=None)
    chunks = ChunkedRecognizer(chunked, options)
    for count in (100, 1000, 9000, 21000):
        chunks.partial(wave[:count])
    assert chunks.frames.shape[1] == (((21000 - 400) // 160 + 1) // 4) // 4 * 4
    found, wanted = chunks.final(wave), RedecodingRecognizer(chunked, options).final(wave)
    assert (found.ids, found.words[-1].end) == (wanted.ids, wanted.words[-1].end)
    assert found.avg_logprob == pytest.approx(wanted.avg_logprob, abs=1e-4)
    (cut,) = decode_windows([wave[:5000]], chunked, options)
    chunks = ChunkedRecognizer(chunked, options)
    chunks.partial(wave)
    assert chunks.final(wave[:5000]).ids == cut.ids
    short, (wanted,) = ChunkedRecognizer(chunked, options), decode_windows([wave[:90]], chunked, options)
    assert short.final(wave[:90]).ids == wanted.ids


@pytest.mark.ci
def test_silence_is_skipped_and_lines_keep_their_times(shipped):
    wave = read_audio(SAMPLE)[: round(3.4 * RATE)]
    both = torch.cat([wave, torch.zeros(3 * RATE), wave])
    _, finals, figures = lines(pcm(both), shipped, step=2.0)
    assert len(finals) == 2
    assert finals[0].text == finals[1].text
    assert finals[1].start - finals[0].start == pytest.approx(6.4, abs=0.1)
    assert figures["seconds"] == pytest.approx(len(both) / RATE)


@pytest.mark.ci
def test_an_utterance_begins_before_its_speech(shipped):
    data, begins = pcm(torch.cat([torch.zeros(2 * RATE), read_audio(SAMPLE)[: 2 * RATE]])), []
    for padding in (0.0, 0.3, 1.0):
        options = live.live_options(shipped, LiveOptions(prefix_padding=padding))
        reader = PcmReader(io.BytesIO(data).read1, RATE)
        session = live.LiveSession(shipped, options, reader)
        for piece in reader:
            if not [*session.piece(piece)] and session.begin is not None:
                break
        begins.append(session.begin / RATE)
    assert [begins[0] - begin for begin in begins] == pytest.approx([0, 0.3, 1.0], abs=1e-4)


def test_the_threshold_is_the_models_own(shipped):
    threshold = lambda **options: live.live_options(shipped, LiveOptions(**options)).threshold
    card = shipped.card["transcribe"]["vad_threshold"]
    assert threshold() == threshold(decode=SpeechDecodingOptions(beam_size=1)) == card == 0.35
    assert threshold(decode=options_for(shipped, {"vad_threshold": 0.6})) == 0.6
    assert threshold(decode=options_for(shipped, {"vad_threshold": 0.6}), threshold=0.2) == 0.2


@pytest.mark.ci
def test_the_buffer_does_not_grow(chunked):
    decode = SpeechDecodingOptions(beam_size=1, logprob_threshold=None)
    sizes, source = [], io.BytesIO(pcm(torch.randn(7 * RATE) * 0.1))
    for threshold in (0.0, 1.0):
        source.seek(0)
        options = LiveOptions(threshold=threshold, longest=2.0, decode=decode)
        going = live.LiveSession(chunked, options, PcmReader(source.read, RATE))
        for piece in going.reader:
            for _ in going.piece(piece):
                pass
            sizes.append(len(going.buffer))
    assert max(sizes) < 2.5 * RATE


def test_lines_come_while_the_stream_is_open(chunked):
    data, (out, into) = pcm(read_audio(SAMPLE)[: 3 * RATE]), os.pipe()
    try:
        threading.Thread(target=os.write, args=(into, data), daemon=True).start()
        options = LiveOptions(
            threshold=0.0, longest=2.0, decode=SpeechDecodingOptions(beam_size=1, logprob_threshold=None)
        )
        events = live.run(lambda size: os.read(out, size), chunked, options)
        final = next(event for event in events if event.kind == "final")
        assert 0 < final.end <= 2.0
        assert final.latency > 0
    finally:
        os.close(into)
    assert [event.kind for event in events][-2:] == ["final", "summary"]
    os.close(out)


@pytest.mark.ci
def test_another_rate_is_resampled(shipped):
    wave = read_audio(SAMPLE, rate=48000)[: round(3.4 * 48000)]
    _, (final,), figures = lines(pcm(wave), shipped, rate=48000, step=2.0)
    assert "young boy" in final.text
    assert figures["seconds"] == pytest.approx(3.4, abs=0.01)


def test_half_a_sample_at_the_end_is_warned_of(chunked):
    decode, data = SpeechDecodingOptions(beam_size=1, logprob_threshold=None), pcm(read_audio(SAMPLE)[:RATE])
    with pytest.warns(TruncatedAudio, match=r"^stdin: .*32001 bytes"):
        _, (odd,), _ = lines(data + b"x", chunked, decode=decode, threshold=0.0)
    _, (even,), _ = lines(data, chunked, decode=decode, threshold=0.0)
    assert odd.text == even.text


def broken(_):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(("read", "message"), [
    (io.BytesIO(b"").read1, "stdin: no samples .0 bytes"), (io.BytesIO(b"x").read1, "no samples .1 bytes"),
    (broken, "stdin: cannot be read .*Input/output"),
])  # fmt: skip
def test_an_unusable_stream_is_one_line(shipped, read, message):
    with pytest.raises(AudioError, match=message) as error:
        list(live.run(read, shipped))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_wav_header_is_not_sound(size):
    sound = wav(0.1, rate=16000)
    place = sound.index(b"data")
    extra = sound[:place] + b"LIST\4\0\0\0dat " + sound[place:]
    for given in (sound, extra):
        source = io.BytesIO(given)
        found = torch.cat([piece.samples for piece in PcmReader(lambda _: source.read(size))])  # noqa: B023
        assert torch.equal((found * 32768).short(), torch.frombuffer(bytearray(sound[place + 8 :]), dtype=torch.int16))


@pytest.mark.parametrize(("data", "message"), [
    (b"fLaC" + bytes(99), "expected raw 16-bit samples, got FLAC"), (b"OggS" + bytes(99), "got Ogg"),
    (b"ID3" + bytes(99), "got MP3"), (b"\0\0\0\x1cftypM4A " + bytes(99), "got MP4"),
    (b"FORM" + bytes(99), "got AIFF"), (b"wvpk" + bytes(99), "got WavPack"), (b"RF64" + bytes(99), "got RF64"),
    (b"riff\x2e\x91\xcf\x11" + bytes(99), "got W64"), ((b"G" + bytes(187)) * 3, "got MPEG-TS"),
    (bytes.fromhex("fff16040019f fcde020000 00") * 2, "got AAC"),
    ((bytes.fromhex("fffb9264") + bytes(414)) * 2, "got MP3"),
    ((bytes.fromhex("fff348c4") + bytes(140)) * 2, "got MP3"),
    (wav(0.1, rate=8000), "WAV of 1 channel, 16000 Hz, 16 bits, got 1, 8000"),
])  # fmt: skip
def test_a_recording_is_no_bare_samples(data, message):
    with pytest.raises(AudioError, match=message):
        list(PcmReader(io.BytesIO(data).read1))


@pytest.mark.parametrize(
    "data", [bytes.fromhex("fff16040019f") + bytes(98), bytes.fromhex("fffb9264") + bytes(998), b"G" + bytes(999)]
)
def test_samples_may_begin_as_packets_do(data):
    assert sum(len(chunk.samples) for chunk in PcmReader(io.BytesIO(data).read1)) == len(data) // 2


@pytest.mark.parametrize("options", [{"step": 0.0}, {"step": 20.0}, {"longest": 90.0}, {"silence": 0.0},
                                     {"threshold": 2.0}])  # fmt: skip
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        LiveOptions(**options)


def test_a_model_of_text_and_a_strange_rate_are_refused(shipped):
    with pytest.raises(UsageError, match="expected a speech model, got text"):
        live.run(broken, replace(shipped, model=shipped.model.decoder))
    with pytest.raises(UsageError, match="rate"):
        live.run(broken, shipped, LiveOptions(rate=0))
    with pytest.raises(UsageError, match="lm absent"):
        live.run(broken, shipped, LiveOptions(decode=SpeechDecodingOptions(lm="absent")))


def test_a_reader_that_is_left_ends_its_thread():
    reader = PcmReader(lambda size: bytes(size))  # endless
    before = threading.active_count()
    going = iter(reader)
    next(going)
    going.close()
    wait_for(lambda: threading.active_count() <= before)


@pytest.mark.ci
def test_an_utterance_fits_whispers_window():
    wave = read_audio(asset("sample", "german.flac")).repeat(4)[: 7 * RATE]
    checkpoint = load("whisper-mini")  # 6 s
    decode = options_for(checkpoint, {"language": "de", "temperature": 0.0, "no_speech_threshold": None})
    _, finals, _ = lines(pcm(wave), checkpoint, threshold=0.0, step=5.0, decode=decode)
    assert len(finals) == 2
    assert max(final.end - final.start for final in finals) <= 6


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("language", ["de", None])
def test_whispers_finals_are_its_transcript(language):
    wave, checkpoint = sound(3), whispers()[1]
    options = COMMON | {"language": language, "no_speech_threshold": None, "beam_size": 2, "sample_len": 6}
    partials, (final,), _ = lines(pcm(wave), checkpoint, threshold=0.0, decode=options_for(checkpoint, options))
    wave = torch.frombuffer(bytearray(pcm(wave)), dtype=torch.int16) / 32768
    found = transcribe(wave, checkpoint, without_timestamps=True, **options)
    assert final.text == " ".join(found["text"].split()) != ""
    assert (final.start, final.end) == (0.0, 3.0)
    assert partials[0].text
