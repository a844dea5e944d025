"""What kernels of compiled code cost on the device in use.

In: a joint graph. Out: `MeasuredRates`. Ops that run alone are measured one by one like in eager training, each
distinct one once, convolutions in the layout that Inductor will give them; fused kernels cost what they read and write,
at the rate at which the device adds two large tensors. Starting a kernel costs the same for all. FlexAttention is
estimated: eager runs it op by op, with all scores in memory, and Inductor makes one kernel of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from remat.inductor.model.joint import Joint, Kind
from remat.inductor.model.program import MeasuredRates
from remat.pytorch.costs.op_costs import Progress, costs_of, op_key, stream_bytes_per_ns
from remat.pytorch.costs.roofline import roofline_ns

KERNEL_NS = {"cuda": 2_000.0, "cpu": 5_000.0}
"""Of starting one kernel from Inductor's code: on CUDA, of the device, which is behind the host."""
BETWEEN_NS = {"cuda": 700.0}
"""What a kernel of a step waits for the one before it, beyond what it would wait in a row of its like: by steps of T5,
Qwen2 and ConvNeXt on an H200."""
COMPUTED_ON_CUDA = {"random_bytes": 4.0, "slow_bytes": 1.6, "summed_bytes": 1.6}
"""Fitted to kernels of GPT-2, BERT and Llama on an H200; on a CPU they hardly differ from moving what they read."""


def measure_rates(
    joint: Joint,
    nodes: Sequence[Node],
    device: torch.device,
    factors: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> MeasuredRates:
    """See the module's docstring; `nodes` are those of the graph that `joint` was read from, in the layouts in which
    they will run, `factors` what is known of fused kernels.
    """
    alone = {
        number: nodes[number] for number, node in enumerate(joint.nodes) if node.kind is Kind.ALONE and not node.is_part
    }
    templates = {number: roofline_ns(node, device) for number, node in alone.items() if _is_template(node)}
    keys = {number: op_key(node) for number, node in alone.items() if number not in templates}
    known = costs_of({key: alone[number] for number, key in keys.items()}, device, progress)
    taken = templates | {number: known[key].time_ns for number, key in keys.items()}
    start_ns, between_ns = KERNEL_NS.get(device.type, KERNEL_NS["cuda"]), BETWEEN_NS.get(device.type, 0.0)
    return MeasuredRates(
        bytes_per_ns=stream_bytes_per_ns(device),
        kernel_ns=start_ns,
        alone_ns={number: time_ns + between_ns for number, time_ns in taken.items()},
        between_ns=between_ns,
        workspace_bytes={number: known[key].workspace_bytes for number, key in keys.items()},
        stores_heavy=device.type == "cpu",
        sums_in_place=device.type == "cpu",
        factors=factors or {},
        **(COMPUTED_ON_CUDA if device.type == "cuda" else {}),
    )


def _is_template(node: Node) -> bool:
    """Whether Inductor makes code of its own of an op for which eager has no kernel."""
    return str(node.target).startswith("flex_attention")
