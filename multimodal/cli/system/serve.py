"""`multimodal serve`: an HTTP server with OpenAI's protocol, and a page."""

from argparse import Namespace

from multimodal.cli.output import fail
from multimodal.cli.parser import Parser
from multimodal.errors import UsageError
from multimodal.serve.options import ServeOptions
from multimodal.system.files import say
from multimodal.system.options import add_flags as add_option_flags

EXAMPLES = """examples:
  multimodal serve                                              # http://127.0.0.1:8000, with the shipped models
  multimodal serve --models whisper-base clip-vit-b-32 --alias whisper-1=whisper-base
  multimodal serve --host 0.0.0.0 --api_key "$KEY" --index photos=photos.index
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s [--models MODEL ...] [flags]", EXAMPLES
    several = ("models", "alias", "index", "api_key", "cors", "allow_urls")
    for name in several:
        own = ServeOptions.declared[name]
        p.add_argument(f"--{name}", nargs="+", action="extend", metavar=own.metavar, help=own.described())
    add_option_flags(p, ServeOptions, [name for name in ServeOptions.declared if name not in several])


def run(options: Namespace) -> int:
    try:
        import fastapi  # noqa: F401  an optional part of the installation
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        return fail(UsageError(f"serve: {error.name} is not installed (pip install '.[serve]')"))
    from multimodal.serve.run import serve

    given = {
        name: value for name, value in vars(options).items() if name in ServeOptions.declared and value is not None
    }
    return serve(ServeOptions(**given), lambda address: say(f"multimodal: serving at {address}"))
