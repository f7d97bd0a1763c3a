"""Options of reading data sets."""

from multimodal.system.options import OptionSet, option


class SubsetOptions(OptionSet):
    limit: int | None = option(None, "only N items, evenly spread over the data", "N", low=1)


class FirstOptions(OptionSet):
    limit: int | None = SubsetOptions.limit.but(None, help="only the first N items")


class ValidateOptions(OptionSet):
    kind: str = option("auto", "kind of the items; auto: by the file's ending", choices=("auto", "image", "audio"))
    workers: int | None = option(None, "processes (default: one per core, at most 8)", "N", low=1)
