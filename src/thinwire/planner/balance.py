"""Das et al.'s balance of computing and sending: who sends how much, and the best number of groups; no torch.

Letters as in the paper (arXiv:1602.06709, 2016): N nodes, G groups of N/G nodes; `ifm`, `ofm` the input and
output features of a layer, `minibatch` the samples of all nodes together. `overlap` is how much sending and
receiving hide each other: 0 not at all, 1 wholly (full duplex).
"""

from __future__ import annotations

import math

from thinwire.errors import check, check_count

SIZE_DATA = 4
"""Bytes of a number (FP32)."""


def data_parallel_bytes(ifm: int, ofm: int, *, kernel: int = 1, overlap: float = 1.0) -> float:
    """Bytes of a layer's weights and their gradients that a node sends and receives in a step.

    >>> data_parallel_bytes(4096, 4096) / 1e6
    67.108864
    """
    return SIZE_DATA * ifm * ofm * kernel * (2 - overlap)


def model_parallel_bytes(ifm: int, minibatch: int, *, side: int = 1) -> float:
    """Bytes of activations forward and their gradients back, where nodes share the work of a layer.

    >>> model_parallel_bytes(4096, 256) / 1e6
    8.388608
    """
    return 2 * SIZE_DATA * ifm * side * side * minibatch


def hybrid_bytes(
    ifm: int, ofm: int, *, minibatch: int, nodes: int, groups: float, overlap: float = 1.0
) -> float:
    """Bytes of a fully connected layer that is model-parallel inside groups and data-parallel between them.

    With one group it is all model-parallel, with as many groups as nodes all data-parallel.

    >>> round(hybrid_bytes(4096, 4096, minibatch=256, nodes=64, groups=3) / 1e6, 1)
    5.9
    """
    check(1 <= groups <= nodes, "groups", f"1 to {nodes}", groups)
    inside = model_parallel_bytes(ifm, minibatch) / groups if groups < nodes else 0.0
    between = data_parallel_bytes(ifm, ofm, overlap=overlap) * groups / nodes if groups > 1 else 0.0
    return inside + between


def best_groups(ifm: int, ofm: int, *, minibatch: int, nodes: int, overlap: float = 1.0) -> int:
    """The number of groups, among those that divide the nodes evenly, with which a layer sends least.

    The derivative is zero at G = sqrt(2 N minibatch / (ofm (2 - overlap))).

    >>> best_groups(4096, 4096, minibatch=256, nodes=64)
    4
    """
    for field, value in (("ifm", ifm), ("ofm", ofm), ("minibatch", minibatch), ("nodes", nodes)):
        check_count(field, value, "them")
    possible = [groups for groups in range(1, nodes + 1) if nodes % groups == 0]

    def sent_bytes(groups: int) -> float:
        return hybrid_bytes(ifm, ofm, minibatch=minibatch, nodes=nodes, groups=groups, overlap=overlap)

    return min(possible, key=sent_bytes)


def best_groups_real(ofm: int, *, minibatch: int, nodes: int, overlap: float = 1.0) -> float:
    """The same without asking that groups are whole.

    >>> round(best_groups_real(4096, minibatch=256, nodes=64), 1)
    2.8
    """
    return math.sqrt(2 * nodes * minibatch / (ofm * (2 - overlap)))


def smallest_conv_batch(
    flop_per_s: float, bytes_per_s: float, *, outputs: int, overlap: float = 1.0
) -> float:
    """Samples per node above which a convolution's gradients hide behind its computing.

    Independent of kernel and features: 6 minibatch outw outh FLOP per weight against (2 - overlap) times its
    bytes. `outputs` is outw * outh.

    >>> round(smallest_conv_batch(2e12, 1.25e9, outputs=28 * 28), 2)
    1.36
    """
    return flop_per_s / bytes_per_s * SIZE_DATA * (2 - overlap) / (6 * outputs)
