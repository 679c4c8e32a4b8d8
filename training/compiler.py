"""torch.compile as our runs use it: the same bits each time, and fewer passes over weights.

The pass rewrites a graph of ATen operators, after autograd. Both of its changes concern conversions of weights between
32 and 16 bits, which are a quarter of a small model's launches.
"""

import logging
import operator
from collections.abc import Callable

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

CONVERT = torch.ops.prims.convert_element_type.default
PRODUCT = torch.ops.aten.mm.default

# PyTorch asks of what is computed again that it changes nothing in place, in four lines on the console; no block does
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def compiled(function: Callable) -> Callable:
    """Compile `function`, or a module, separately for each set of shapes that it is called with.

    The options are set for each graph: global ones would also apply to a peer in the same process, and Dynamo resets
    `deterministic` to torch.are_deterministic_algorithms_enabled() whenever it has traced a graph (torch 2.11).
    """
    return torch.compile(function, dynamic=False, options=_CHOICES)


class FewerConversions(CustomGraphPass):
    """On CUDA, products return the gradients of weights in fp32, and one kernel converts all weights to 16 bits."""

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
    """Make a 16-bit `product` that is only used by `node`, its conversion to fp32, return fp32 without rounding."""
    with graph.inserting_before(node):
        wide = graph.call_function(torch.ops.aten.mm.dtype, (*product.args, torch.float32))
    wide.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(wide)
    graph.erase_node(node)
    graph.erase_node(product)


def _convert_together(graph: fx.Graph, dtype: torch.dtype, nodes: list[fx.Node]) -> None:
    """Replace conversions of inputs by one operator, before all others; the compiler makes it one kernel."""
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
    # else it would choose orders of sums by their speed at the time: another process would get other bits
    "deterministic": True,
    # its own random numbers take longer than all else in a norm's kernel, and differ from an uncompiled run's
    "fallback_random": True,
    # its order of kernels "for peak memory" needs more: 4 recomputed layers take 4.14 GiB with it, 3.80 without
    "reorder_for_peak_memory": False,
    "post_grad_custom_pre_pass": FewerConversions(),
}
