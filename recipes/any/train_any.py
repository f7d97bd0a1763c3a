r"""Train an any-to-text model: connectors and a text decoder on trained image and audio encoders.

    q=questions/train
    python recipes/any/train_any.py --data $q/texts.jsonl=96 --image clip-vit-16 --audio asr-conformer-en --share \
        --freeze image audio image_connector audio_connector --steps 600 --run text-run --out any-text
    data="$q/captions.jsonl=12 $q/described.jsonl=16 $q/classes.jsonl=24 $q/yes_no.jsonl=56 $q/an4.jsonl=10 \
        $q/spelled.jsonl=8 $q/fsdd.jsonl=2 $q/speechocean762.jsonl=2 $q/languages.jsonl=5 $q/clips.jsonl=8 \
        $q/texts.jsonl=7"
    python recipes/any/train_any.py --data $data --init any-text --freeze image audio decoder --steps 150 \
        --optimizer adamw --rate 2e-3 --run connect-run --out any-connect --trust_paths
    python recipes/any/train_any.py --data $data --init any-connect --freeze image audio --steps 3500 \
        --augment_sound --run any-run --out any --trust_paths --card recipes/data/any_card.json
    multimodal evaluate answers questions/test/clips.jsonl --model any

`ask_images.py`, `ask_speech.py`, `ask_texts.py` and `ask_clips.py` make such data; own data has the same form: JSON
lines of `messages` as chat models take them, the last one the assistant's. `--init` with `--image` or `--audio` takes
the encoders of other models, to which connectors and decoder are then trained. `--data FILE=COUNT`: so many rows of the
file in each batch. The first command teaches a new decoder text, the second the connectors alone, the third both.

Cost: 10, 8 and about 130 minutes of one core (Intel Xeon with AVX-512, float32), up to 8 GB of memory for what frozen
encoders gave. The shipped any-mini came by a longer way (the card's training_note). Its results on held-out items,
without the inputs in brackets: yes or no 77.2 % (50.0), classes 17.5 % of 282 (1), language of speech 98.5 %
(25.0), AN4 WER 7.9 %, in clips colour 98.3 % (0), motion 93.1 % (13.9), order 89.8 % (0), captions of Flickr8k CIDEr
25.2 (6.8), with 4 beams 26.7, of length penalty 0.3 24.6. On its first encoders, trained four times as long, clips had
98, 100 and 92 %. There `--augment_sound`, spelled words and a captioner's captions took AN4 from 13.4 to 8.2. Tried and
lost: the encoder's fourth layer of six with dropout and label smoothing left yes or no at 53 %. 1.6 MB in 8 bits with
`--share`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

from multimodal.data.datasets.captions import CaptionAugmentSettings, SourcePart, together
from multimodal.data.datasets.chats import media_of, open_chats
from multimodal.data.loader import generator
from multimodal.data.manifests import short_names
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import SourceRow
from multimodal.errors import CheckpointError, MultimodalError, UsageError, demand, one_line
from multimodal.models.any_to_text import AnyToText
from multimodal.system.assets import shipped
from multimodal.system.files import read_json
from multimodal.system.options import Positive, Rate
from multimodal.tokens.chat.messages import read_messages
from multimodal.tokens.video.options import VideoOptions
from multimodal.train import KeepBest, Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.device import moved
from multimodal.train.lora import freeze, frozen, keep_sizes, text_sizes, with_rates
from multimodal.train.objectives.any_to_text import Answering, PrepareChat, collate
from multimodal.train.objectives.any_to_text_model import AnySettings, begin, with_encoders
from multimodal.train.objectives.augment_speech import SpeechAugmentation
from multimodal.weights.card import inherited
from multimodal.weights.files.shared import SharedPart
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


@dataclass(frozen=True)
class AnyRun:
    data: tuple[str, ...]  # FILE=COUNT: JSON lines of conversations, and how many of them a batch has
    out: Path  # folder for the checkpoint with the lowest validation loss
    init: str | None = None  # any-to-text model to train further
    image: str | None = None  # model whose image encoder it uses, such as clip-vit-16; by default that of `init`
    audio: str | None = None  # model whose audio encoder it uses, such as asr-conformer-en
    share: bool = False  # these encoders, frozen and of shipped models, stay out of its checkpoints
    freeze: tuple[str, ...] = ()  # parts to freeze, such as `image`
    hold: float = 0.02  # share of each file held out for validation
    most_held: Positive = 64  # rows of each file to validate with
    frames: Positive = 8  # of a video
    smoothing: Rate = 0.0  # label smoothing
    card: Path | None = None  # JSON file of facts for the checkpoint's card
    model: AnySettings = AnySettings()
    augment: CaptionAugmentSettings = CaptionAugmentSettings()
    augment_sound: bool = False  # recordings as well; their frozen encoder then runs each time
    sound: SpeechAugmentation = SpeechAugmentation()
    trust: Trust = Trust()
    loop: LoopSettings = LoopSettings(
        Path("any-run"), 4000, OptimSettings(3e-3, "muon", warmup=50, weight_decay=0.05, average=0.99),
        evaluate_every=500,
    )  # fmt: skip


def parts_of(s: AnyRun) -> tuple[list[SourcePart], list[SourcePart]]:
    """The files to train on, and what is held out of each. Rows about a file that is validated with are not trained.
    Raises UsageError for a file without a count or without a row to train."""
    train, val = [], []
    for one in s.data:
        path, equals, count = one.rpartition("=")
        if not equals or not count.isdecimal() or not int(count):
            raise UsageError(f"{one}: expected FILE=COUNT, with a count of rows in a batch", argument="data")
        own, held = SourcePart.whole(open_chats(path, s.trust), int(count)).held_out(s.hold, rank)
        step = -(-len(held.keys) // s.most_held)
        train.append(own)
        val.append(replace(held, keys=held.keys[::step]))
    shown = {medium for part in val for row in part.rows() for medium in media_of(row)}
    for number, (one, own, held) in enumerate(zip(s.data, train, val, strict=True)):
        kept = [key for key in own.keys if shown.isdisjoint(media_of(own.source.row(key)))]
        path, left = one.rpartition("=")[0], len(own.keys) - len(kept)
        log.info("%s: %d rows, %d to validate with, %d left out that show the same files", path, len(kept),
                 len(held.keys), left)  # fmt: skip
        if not kept:
            raise UsageError(f"{one}: all its rows show files that are validated with", argument="data")
        train[number] = replace(own, keys=kept)
    return train, val


def rank(row: SourceRow) -> str:
    """A random order by what rows show, the same for all files and wherever they lie; broken rows come last."""
    media = [Path(one).parts[-2:] if isinstance(one, str) else one for one in media_of(row)]
    return "~" * bool(row.fault) + sha256(repr(media or row.fields).encode()).hexdigest()


def texts_of(parts: list[SourcePart]) -> Iterator[str]:
    for part in parts:
        for row in part.rows():
            yield from row.texts
            if not row.fault:
                yield from (message.text for message in read_messages(row.fields["messages"]))


def initial(s: AnyRun, parts: list[SourcePart]) -> Checkpoint:
    image, audio = (load(name) if name else None for name in (s.image, s.audio))
    if s.share and (loose := [part for part in ("image", "audio") if getattr(s, part) and part not in s.freeze]):
        raise UsageError(f"needs --freeze {' '.join(loose)}", argument="share")
    if s.share and image is audio is None:
        raise UsageError("needs --image or --audio", argument="share")
    for part, name in {"image": s.image, "audio": s.audio}.items():
        known = not s.share or name is None or name in shipped()
        demand(part, name, known, f"a shipped model with --share ({', '.join(shipped())})")
    if s.init is None:
        made = begin(image, audio, texts_of(parts), s.model)
    else:
        made = load(s.init)
        if not isinstance(made.model, AnyToText) or made.chat is None:
            raise CheckpointError(f"{s.init}: expected an any-to-text model with a chat format, got {made.kind}")
        made = with_encoders(made, image, audio)
        sizes = text_sizes(made.model.config.decoder) | {"image_layers": made.model.config.image_layers or 0}
        keep_sizes(s.init, sizes, s.model, AnyRun.model)
        made = replace(made, model=with_rates(made.model, {"decoder.stack.block.dropout": s.model.dropout}))
    return replace(made, shared=made.shared + (shared_encoders(s.image, image, s.audio, audio) if s.share else ()))


def shared_encoders(
    image_name: str | None, image: Checkpoint | None, audio_name: str | None, audio: Checkpoint | None
) -> tuple[SharedPart, ...]:
    """A new model's encoders as parts of the models they come from."""
    known = (("image", image_name, image), ("audio", audio_name, audio))
    places = {"image": "image" if image and image.kind == "clip" else "",
              "audio": "encoder" if audio and hasattr(audio.model, "encoder") else ""}  # fmt: skip
    return tuple(SharedPart(part, name, places[part]) for part, name, own in known if own is not None)


@torch.no_grad()
def loss_of(objective: Answering, batches: dict[str, list]) -> dict[str, float]:
    """Mean loss of each file, and their mean."""
    device, found = next(objective.parameters()).device, {}
    for name, own in batches.items():
        total = sum(float(objective(moved(batch, device))["loss"]) for batch in own)
        found[f"{name}_loss"] = total / sum(float(objective.counts(batch)["loss"]) for batch in own)
    return {"loss": sum(found.values()) / len(found)} | found


def held_batches(s: AnyRun, val: list[SourcePart], prepare: PrepareChat) -> dict[str, list]:
    """Validation batches of each file, prepared in one fixed way. Items that cannot be read are left out."""
    made: dict[str, list] = {}
    names = short_names([str(Path(one.rpartition("=")[0]).with_suffix("")) for one in s.data])
    for one, name, part in zip(s.data, names, val, strict=True):
        examples = []
        for key in part.keys:
            try:
                examples.append(prepare(part.source.read(key), generator("held out", key)))
            except MultimodalError as error:
                log.warning("broken item skipped: %s", one_line(error))
        if not examples:
            raise UsageError(f"{one}: no row to validate with can be read", argument="data")
        made.setdefault(name, []).extend(collate(examples[i : i + 16]) for i in range(0, len(examples), 16))
    return made


def main(s: AnyRun) -> None:
    torch.manual_seed(s.loop.seed)
    parts, val = parts_of(s)
    known = initial(s, parts)
    freeze(known.model, s.freeze)
    known = replace(known, shared=frozen(known.shared, known.model))
    if s.augment_sound and getattr(known.model.config.audio, "features", None) != "fixed":
        raise UsageError("needs a Conformer on 'fixed' log-mel features as the audio encoder", argument="augment_sound")
    sound = s.sound if s.augment_sound else None
    prepare = PrepareChat(known, VideoOptions(max_frames=s.frames), s.augment, sound)
    source, plan = together(parts, s.loop.seed)
    objective = Answering(known.model, known.preprocessing, s.smoothing)
    held = held_batches(s, val, prepare)

    judging = Answering(known.model, known.preprocessing)  # keeps its own states

    def measure(model: nn.Module) -> dict[str, float]:
        judging.model = model
        return loss_of(judging.eval(), held)

    card = (read_json(s.card) if s.card else inherited(known.card)) | {"ask": {"max_frames": s.frames}}
    judge = KeepBest(s.loop, measure, lambda found: -found["loss"], replace(known, card=card), newest=True)
    Loop(s.loop, objective, s.loop.loader(source, plan, prepare, collate), judge, judge.start).fit()
    finish(s, judge.load(), [one.rpartition("=")[0] for one in s.data], store="float16")


if __name__ == "__main__":
    start(main)
