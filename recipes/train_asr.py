"""Trains the shipped English recogniser: a Conformer with a CTC output and a small attention decoder, on a CPU.

    python recipes/train_asr.py --train speechocean762/train.jsonl an4/train.jsonl fsdd/train.jsonl synth/train.jsonl \\
        --valid speechocean762/valid.jsonl --run run-asr --out asr-conformer-en

Cost: 8.8 h of sound (4.1 h of it made by speak.py), 6,000 steps at 0.27 s and, from their state, 3,500 more with
`--resume --steps 9500`: 46 minutes on one core of a 2-core machine with bfloat16 instructions. It has not converged.
Greedy WER in percent (evaluate_asr.py): FSDD test 1.3, AN4 test 20.8, held-out synthetic captions 31.5,
speechocean762 test 75.2, LJSpeech (never seen) 87.1.
"""

import argparse
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conv import ConformerConfig
from multimodal.blocks.stack import transformer
from multimodal.heads import ctc_loss, token_loss
from multimodal.models.seq2seq import JointConformer, JointConformerConfig
from multimodal.models.speech import ConformerEncoderConfig
from multimodal.models.text import TextConfig
from multimodal.tokens.bytepair import BytePairTokenizer
from multimodal.tokens.tokenizer import Tokenizer
from multimodal.train import speech
from multimodal.train.optim import Average, parameter_groups, set_learning_rate, warmup_cosine
from multimodal.train.state import newest_state, save_state
from multimodal.weights.folder import Checkpoint, save_folder


def config(vocabulary: int, width: int, layers: int, drop_path: float = 0.05) -> JointConformerConfig:
    attention = AttentionConfig(width, heads=4)
    block = ConformerConfig(attention, hidden=4 * width, kernel=15, conv_norm="layer")
    encoder = ConformerEncoderConfig(80, block, layers, subsample=4, channels=32, rotary=True, drop_path=drop_path)
    stack = transformer(width, 2, 4, 2 * width, source_width=width)
    return JointConformerConfig(encoder, vocabulary, TextConfig(vocabulary, 200, stack, causal=True, tied=True))


def loss_of(model: JointConformer, batch: speech.SpeechBatch, tokenizer: Tokenizer, autocast: bool) -> torch.Tensor:
    """0.3 attention + 0.7 CTC, of which 0.3 falls on the middle layer (Lee and Watanabe 2021)."""
    states: list[torch.Tensor] = []
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        frames, lengths = model.encoder(batch.features, batch.lengths, states)
        outer, inner = model.ctc_logits(frames), model.ctc_logits(states[len(states) // 2])
        rows, width = batch.ids.shape
        valid = torch.arange(width + 1) <= batch.id_lengths[:, None]
        before = torch.cat([torch.full((rows, 1), tokenizer.bos_id), batch.ids], 1)
        after = torch.cat([batch.ids, torch.zeros(rows, 1, dtype=torch.long)], 1)
        after[torch.arange(rows), batch.id_lengths] = tokenizer.eos_id
        real = torch.arange(frames.shape[1]) < lengths[:, None]
        logits = model.attend(before, frames, real)
    ctc = [ctc_loss(x, lengths, batch.ids, batch.id_lengths, model.config.blank) for x in (outer, inner)]
    return 0.3 * token_loss(logits, after, valid, smoothing=0.1) + 0.7 * (0.7 * ctc[0] + 0.3 * ctc[1])


def averaged(model: JointConformer, average: Average) -> JointConformer:
    copy = JointConformer(model.config)
    copy.load_state_dict(average.weights)
    return copy.eval()


def note(run: Path, line: dict) -> None:
    with (run / "log.jsonl").open("a") as log:
        print(json.dumps(line), file=log)


def train(args: argparse.Namespace) -> None:
    from jiwer import wer

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    features = [f for path in args.train for f in speech.load_features(path, args.run / "cache")]
    texts = [speech.plain(u.text) for path in args.train for u in speech.read_manifest(path)]
    valid = speech.load_features(args.valid, args.run / "cache")[: args.valid_count]
    valid_texts = [speech.plain(u.text) for u in speech.read_manifest(args.valid)][: args.valid_count]
    tokenizer = BytePairTokenizer.train([" " + t for t in texts], args.vocabulary, lowercase=True)
    ids = [speech.transcript_ids(tokenizer, t) for t in texts]
    model = JointConformer(config(tokenizer.vocab_size, args.width, args.layers))
    optimizer = torch.optim.AdamW(parameter_groups(model, args.decay), betas=(0.9, 0.98), lr=args.rate, fused=True)
    average, first = Average(model, 0.999), 0
    if args.resume and (state := newest_state(args.run)):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average.weights, average.updates, first = state["average"], state["updates"], state["step"]
        torch.set_rng_state(state["random"])
    lengths = [len(f) for f in features]
    share = speech.padding_share(
        speech.bucketed([[i] for i in range(len(ids))], lengths, args.budget, torch.Generator()), lengths
    )
    print(f"{len(ids)} utterances, {sum(lengths) / 360000:.2f} h, {tokenizer.vocab_size} tokens, {share:.1%} padding, "
          f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")  # fmt: skip
    sums, started = [], time.time()
    batches = speech.training_batches(features, ids, args.budget, args.seed, first, args.easy)
    for step in range(first, args.steps):
        epoch, batch = next(batches)
        set_learning_rate(optimizer, args.rate * warmup_cosine(step, args.steps, args.warmup, 0.01))
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # the fused backward is slower on a CPU
            loss = loss_of(model.train(), batch, tokenizer, args.autocast)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        if math.isfinite(norm):
            optimizer.step()
            average.update(model)
        sums.append(loss.item())
        done = step + 1
        if done % args.every == 0 or done == args.steps:
            mean, sums = sum(sums) / len(sums), []
            line = {"step": done, "epoch": epoch, "loss": round(mean, 4), "seconds": round(time.time() - started)}
            note(args.run, line)
        if done % args.save == 0 or done == args.steps:
            score = wer(valid_texts, speech.greedy_texts(averaged(model, average), tokenizer, valid))
            note(args.run, {"step": done, "valid_wer": round(score, 4)})
            save_state(args.run, done, {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "average": average.weights,
                "updates": average.updates, "step": done, "random": torch.get_rng_state(),
            })  # fmt: skip
    card = json.loads(args.card.read_text()) if args.card else {}
    save_folder(Checkpoint(averaged(model, average), tokenizer, card=card), args.out, dtype=torch.float16)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder of the log, states and cached features")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--card", type=Path, help="JSON file of facts to store with the weights")
    parser.add_argument("--resume", action="store_true", help="go on from the newest state of --run")
    for name, value in {
        "steps": 6000, "warmup": 300, "rate": 1.5e-3, "decay": 0.02, "budget": 4000, "vocabulary": 320, "width": 144,
        "layers": 6, "easy": 18, "every": 50, "save": 500, "valid_count": 100, "seed": 1, "threads": 1,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(arguments())
