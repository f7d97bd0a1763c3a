"""Options of storing weights."""

from typing import Literal, get_args

from multimodal.system.options import OptionSet, option

Store = Literal["float32", "float16", "bfloat16", "int8"]


class StoreOptions(OptionSet):
    store: str = option("float32", "number type of the stored weights; int8: one scale for 32 numbers of a matrix, "
                        "float16 for vectors, 27 % of float32's size", choices=get_args(Store))  # fmt: skip
