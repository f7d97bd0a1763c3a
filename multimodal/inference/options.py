"""Options of computing with a model."""

from multimodal.system.options import OptionSet, option

DEVICE = "cpu, cuda or another of torch's; auto: a GPU where there is one, else the CPU"
COMPUTE_TYPES = ("auto", "float32", "bfloat16", "float16", "int8")


class BatchOptions(OptionSet):
    """Options of commands and functions over many inputs."""

    batch_size: int = option(32, "inputs per batch", "N", low=1)
    workers: int | None = option(None, "threads that read images (default: one per core)", "N", low=1)
