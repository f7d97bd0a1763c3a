"""Options of computing with a model."""

from multimodal.system.options import OptionSet, option

DEVICE = "cpu, cuda or another torch device; auto: the GPU if there is one, else the CPU"
COMPUTE_TYPES = ("auto", "float32", "bfloat16", "float16", "int8")


class MachineOptions(OptionSet):
    """`threads` 0 or None: torch's own number."""

    device: str = option("auto", DEVICE, "NAME")
    compute_type: str = option("auto", "number type that the model computes in. auto: 16-bit floats on a GPU; on a "
                               "CPU float32, but bfloat16 in Whisper's encoder if that is quicker. float16 needs a "
                               "GPU, int8 a CPU (default: auto)", choices=COMPUTE_TYPES)  # fmt: skip
    threads: int | None = option(None, "CPU threads (default: torch's)", "N", low=0, high=1024)  # torch starts them all


class BatchOptions(OptionSet):
    """Options of commands and functions over many inputs."""

    batch_size: int = option(32, "inputs per batch", "N", low=1)
    workers: int | None = option(None, "threads that read images (default: one per core)", "N", low=1)
