"""torch.compile as our runs use it: the same bits each time, and fewer passes over weights.

A pass gets a graph of ATen operators after autograd. Both are about conversions of weights between 32 and 16 bit, which
are a quarter of a small model's launches.
"""

import operator
from collections.abc import Callable

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

CONVERT = torch.ops.prims.convert_element_type.default
PRODUCT = torch.ops.aten.mm.default


def compiled(function: Callable) -> Callable:
    """`function`, or a module, compiled for the shapes that it is called with, each for itself.

    Each graph is told the choices: as global settings they would be an opponent's too, and Dynamo sets `deterministic`
    back to what torch.are_deterministic_algorithms_enabled says whenever it has traced one (torch 2.11).
    """
    return torch.compile(function, dynamic=False, options=_CHOICES)


class FewerConversions(CustomGraphPass):
    """On CUDA: gradients of weights leave their products in fp32, and all weights become 16 bit in one kernel."""

    def __call__(self, graph: fx.Graph) -> None:
        converted = [
            node
            for node in graph.find_nodes(op="call_function", target=CONVERT)
            if node.meta["val"].device.type == "cuda"
        ]
        together: dict[torch.dtype, list[fx.Node]] = {}
        for node in converted:
            source, dtype = node.args
            if dtype == torch.float32 and source.target is PRODUCT and len(source.users) == 1:
                _keep_in_float32(graph, node, source)
            elif source.op == "placeholder" and source.meta["val"].dtype == torch.float32 and dtype.itemsize == 2:
                together.setdefault(dtype, []).append(node)
        for dtype, nodes in together.items():
            _convert_together(graph, dtype, nodes)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def _keep_in_float32(graph: fx.Graph, node: fx.Node, product: fx.Node) -> None:
    """A 16-bit product of which only `node`, its conversion, is used is not rounded to 16 bit in between."""
    with graph.inserting_before(node):
        wide = graph.call_function(torch.ops.aten.mm.dtype, (*product.args, torch.float32))
    wide.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(wide)
    graph.erase_node(node)
    graph.erase_node(product)


def _convert_together(graph: fx.Graph, dtype: torch.dtype, nodes: list[fx.Node]) -> None:
    """Conversions of the graph's inputs as one operator, before all others; the compiler makes it one kernel."""
    values = [node.meta["val"] for node in nodes]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        like = [
            graph.call_function(torch.ops.aten.empty.memory_format, (x.shape,), {"dtype": dtype, "device": x.device})
            for x in values
        ]
        sources = [node.args[0] for node in nodes]
        copies = graph.call_function(torch.ops.aten._foreach_copy.default, (like, sources))
        parts = [graph.call_function(operator.getitem, (copies, i)) for i in range(len(nodes))]
    copies.meta["val"] = values
    for node, empty, part, value in zip(nodes, like, parts, values, strict=True):
        empty.meta["val"] = part.meta["val"] = value
        node.replace_all_uses_with(part)
        graph.erase_node(node)


_CHOICES = {
    # else it would choose orders of sums by which was faster just then: another process, other bits
    "deterministic": True,
    # its own random numbers take longer than all else in a norm's kernel, and are others than an uncompiled run's
    "fallback_random": True,
    # its order of kernels "for peak memory" holds more: 4 recomputed layers take 4.14 GiB in it, 3.80 without
    "reorder_for_peak_memory": False,
    "post_grad_custom_pre_pass": FewerConversions(),
}
