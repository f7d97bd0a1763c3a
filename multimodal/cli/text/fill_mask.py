"""`multimodal fill-mask`: guess the masked words or spans of a text."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, print_json, printable
from multimodal.cli.parser import Parser
from multimodal.errors import TextError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.text.options import FillMaskOptions

EXAMPLES = """examples:
  multimodal fill-mask "A man is riding a [MASK]."
  multimodal fill-mask "[MASK] [MASK] [MASK] on the beach." --iterations 4
  multimodal fill-mask "The <mask> crossed the street <mask> home." --model bart-base --beam_size 4
  multimodal fill-mask "The <extra_id_0> walks in <extra_id_1> park." --model t5-small
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s TEXT [TEXT ...] [flags]", EXAMPLES
    p.add_argument("texts", nargs="+", metavar="TEXT", help="with the mask as the model's vocabulary writes it: "
                   "[MASK], <mask>; T5's spans are <extra_id_0>, <extra_id_1>, …")  # fmt: skip
    add_option_flags(p, FillMaskOptions)
    flags.results(p, "table", "json")
    flags.model_and_machine(p, "fill-mask")


def run(options: Namespace) -> int:
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.text.fill_mask import fill_mask, masked_model

    checkpoint = masked_model(loaded(options, "fill-mask"))
    checkpoint = prepare_for_inference(checkpoint, options.compute_type, options.device)
    results, code = [], 0
    for number, text in enumerate(options.texts, 1):
        try:
            (result,) = fill_mask([text], checkpoint, **FillMaskOptions.among(vars(options)))
            results.append({"line": number} | result)
        except TextError as error:
            code = fail(error)
    if options.format == "json":
        print_json(results)
        return code
    for result in results:
        print(printable(result["filled"]))
        for number, guesses in enumerate(result.get("masks", []), 1):
            for guess in guesses:
                mask = f"{number}  " if len(result["masks"]) > 1 else ""
                print(f"  {mask}{guess['probability']:.4f}  {printable(guess['token'].strip())}")
    return code
