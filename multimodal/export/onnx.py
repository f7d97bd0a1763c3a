"""ONNX graphs by torch's exporter: 247 nodes for a CLIP image tower where its older tracer makes 544."""

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from multimodal.errors import UsageError, one_line
from multimodal.export.graphs import Graph

NEEDS = ("onnx", "onnxscript", "onnxruntime")


def write_graphs(graphs: list[Graph], folder: Path, store: str = "float32") -> dict[str, Any]:
    """Write graphs; return names of their files, inputs and outputs. `store`: int8 quantizes weights, and activations
    as they come (onnxruntime's dynamic quantization)."""
    made = {}
    for graph in graphs:
        path = folder / f"{graph.name}.onnx"
        export_graph(graph, path)
        if store == "int8":
            quantize(path)
        made[path.name] = {"inputs": list(graph.inputs), "outputs": list(graph.outputs)}
    return made


def export_graph(graph: Graph, path: Path) -> None:
    """Write one graph. Weights of more than 2 GB lie beside it, in `NAME.onnx.data`."""
    names = list(graph.inputs)
    shapes = [dict.fromkeys(graph.axes.get(name, ()), torch.export.Dim.DYNAMIC) for name in names]
    # *arguments of a module are one tuple
    plain = sum(kind.kind is not kind.VAR_POSITIONAL for kind in _parameters(graph))
    dynamic = (*shapes[:plain], *((tuple(shapes[plain:]),) if len(shapes) > plain else ()))
    with torch.no_grad(), warnings.catch_warnings(), _silent():
        warnings.simplefilter("ignore")  # from the exporter
        try:
            program = torch.onnx.export(
                graph.module.eval(), tuple(graph.inputs.values()), dynamo=True, input_names=names,
                output_names=list(graph.outputs), dynamic_shapes=dynamic, verbose=False,
            )  # fmt: skip
        except torch.onnx.OnnxExporterError as error:
            cause = one_line(error.__cause__ or error, 160)
            raise UsageError(f"{graph.name}: torch's exporter cannot make a graph of this model ({cause})") from None
        _clean(program.model, graph)
        program.save(str(path))


def _parameters(graph: Graph) -> list[Any]:
    import inspect

    return list(inspect.signature(graph.module.forward).parameters.values())[: len(graph.inputs)]


@contextlib.contextmanager
def _silent() -> Any:
    """Keep the exporter's progress lines and log from the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _clean(model: Any, graph: Graph) -> None:
    """Name the dimensions, and drop notes of the exporter, which name this machine's files."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        axes = graph.axes.get(value.name, {})
        value.shape = type(value.shape)([axes.get(i, size) for i, size in enumerate(value.shape)])
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
    for function in model.functions.values():
        function.metadata_props.clear()


def quantize(path: Path) -> None:
    """Quantize the matrices of a graph to 8 bits, in place."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with warnings.catch_warnings(), _silent():
        warnings.simplefilter("ignore")
        whole = path.with_name(f"{path.name}.whole")
        path.rename(whole)
        quantize_dynamic(str(whole), str(path), weight_type=QuantType.QInt8)
        whole.unlink()
