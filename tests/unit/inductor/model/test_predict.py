"""Rules of what compiled code holds in memory that were learnt from the code Inductor makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.support.joints import rates_of, uncut_of
from torch import nn

from remat.inductor.model.contract import contract
from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.model.predict import Prediction, predict


class Net(nn.Module):
    """A convolution, then a pooling window that overlaps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.norm, self.pool = nn.BatchNorm2d(8), nn.MaxPool2d(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.norm(self.stem(x)).relu())).square().mean()


def joint_of(autocast: bool) -> Joint:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return uncut_of(Net(), torch.randn(2, 3, 16, 16)).joint


def node(name: str, kind: Kind, phase: Half, reads: tuple[int, ...], number: int, size: int) -> JointNode:
    return JointNode(name, f"test.{name}", kind, phase, reads, number, size, size // 4, True)


def peak_at(joint: Joint, prediction: Prediction, name: str) -> int:
    return next(moment.live_bytes for moment in prediction.moments if joint.nodes[moment.node].name == name)


def test_what_is_also_summed_up_is_not_written_over_on_a_gpu() -> None:
    """Softmax-like: rows of a product are summed up and scaled in one kernel."""
    made = node("product", Kind.ALONE, Half.FORWARD, (0,), 1, 1000)
    summed = replace(node("sum", Kind.SUM, Half.FORWARD, (1,), 2, 10), sums_rows=True)
    nodes = (
        node("input", Kind.INPUT, Half.FORWARD, (), 0, 0),
        made,
        summed,
        node("scaled", Kind.FUSED, Half.FORWARD, (1, 2), 3, 1000),
        node("next", Kind.ALONE, Half.FORWARD, (3,), 4, 1000),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 5, 0),
        node("grad", Kind.ALONE, Half.BACKWARD, (5,), 6, 100),
    )
    joint = Joint(nodes, frozenset([4]), frozenset([6]))
    on_cpu = rates_of(joint)
    in_place = predict(joint, frozenset(), on_cpu)
    apart = predict(joint, frozenset(), replace(on_cpu, sums_in_place=False))
    assert peak_at(joint, in_place, "scaled") == 1000
    assert peak_at(joint, apart, "scaled") == 2000


def test_a_pooling_window_reads_from_memory() -> None:
    joint = joint_of(autocast=False)
    pool = next(number for number, item in enumerate(joint.nodes) if item.reads_often)
    (read,) = {joint.nodes[number].owner for number in joint.nodes[pool].reads}
    assert joint.nodes[read].kind is Kind.FUSED, "a normalised value is made in a fused kernel"
    assert read in contract(joint, rates_of(joint)).node_of


def test_an_image_is_saved_in_the_type_that_convolutions_read() -> None:
    joint = joint_of(autocast=True)
    images = [number for number in joint.kept if joint.nodes[number].elements == 2 * 3 * 16 * 16]
    assert [joint.nodes[number].size_bytes for number in images] == [2 * 3 * 16 * 16 * 2]
    assert not any(item.is_copied for item in joint.nodes)


def test_an_image_that_convolutions_read_as_it_is_costs_a_copy() -> None:
    joint = joint_of(autocast=False)
    copied = [item for item in joint.nodes if item.is_copied]
    assert [item.size_bytes for item in copied] == [2 * 3 * 16 * 16 * 4]
    without = Joint(
        tuple(replace(item, is_copied=False) for item in joint.nodes),
        joint.forward_outputs,
        joint.gradients,
        joint.kept,
    )
    rates = rates_of(joint)
    more = predict(joint, joint.kept, rates).peak_bytes - predict(without, joint.kept, rates).peak_bytes
    assert more == copied[0].size_bytes


def test_what_grows_for_backward_alone_waits_for_its_reader() -> None:
    """Indices of a pooling window, eight bytes each, are made from offsets of one byte."""
    nodes = (
        node("input", Kind.INPUT, Half.FORWARD, (), 0, 0),
        node("offsets", Kind.ALONE, Half.FORWARD, (0,), 1, 100),
        node("indices", Kind.FUSED, Half.FREE, (1,), 2, 800),
        node("loss", Kind.SUM, Half.FORWARD, (1,), 3, 4),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 4, 0),
        node("first", Kind.ALONE, Half.BACKWARD, (4,), 5, 40),
        node("last", Kind.ALONE, Half.BACKWARD, (2, 5), 6, 40),
    )
    joint = Joint(nodes, frozenset([3]), frozenset([6]))
    contracted = contract(joint, rates_of(joint))
    names = [op.name for op in contracted.graph.ops]
    assert names.index("first") < names.index("indices") < names.index("last")


def drawn_and_read_twice(
    between: int, *, in_turn: bool = False, last: Kind = Kind.FUSED, room_bytes: int = 1000
) -> Joint:
    """A random mask that two kernels of backward read, with `between` products in between; the last may need the first
    kernel's result, or not. Elsewhere so many bytes more are in memory.
    """
    nodes = [
        node("input", Kind.INPUT, Half.FORWARD, (), 0, 0),
        replace(node("random", Kind.FUSED, Half.FORWARD, (0,), 1, 1000), is_random=True),
        node("dropped", Kind.ALONE, Half.FORWARD, (1,), 2, 100),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 3, 0),
        node("first", Kind.FUSED, Half.BACKWARD, (1, 3), 4, 100),
    ]
    for index in range(between):
        read = len(nodes) - 1 if index or in_turn else 3
        nodes.append(node("product", Kind.ALONE, Half.BACKWARD, (read,), len(nodes), 100))
    nodes.append(node("second", last, Half.BACKWARD, (1, len(nodes) - 1), len(nodes), 100))
    gradients = frozenset([4, len(nodes) - 1])
    nodes.append(node("large", Kind.ALONE, Half.BACKWARD, (len(nodes) - 1,), len(nodes), room_bytes))
    return Joint(tuple(nodes), frozenset([2]), gradients)


def test_random_numbers_that_kernels_far_apart_read_are_in_memory() -> None:
    """Inductor draws them once, and keeps them for whoever is too far to be in the same kernel."""
    near, far = drawn_and_read_twice(between=2), drawn_and_read_twice(between=20)
    assert predict(near, frozenset(), rates_of(near)).in_memory == frozenset()
    assert predict(far, frozenset(), rates_of(far)).in_memory == {1}


def test_random_numbers_for_kernels_that_have_no_room_to_be_one_are_in_memory() -> None:
    cramped = drawn_and_read_twice(between=2, room_bytes=0)
    assert predict(cramped, frozenset(), rates_of(cramped)).in_memory == {1}


def written_over(moves: bool) -> int:
    """The peak of a kernel whose result is as large as what it reads, by index or where it writes."""
    nodes = (
        node("input", Kind.INPUT, Half.FORWARD, (), 0, 0),
        node("scores", Kind.ALONE, Half.FORWARD, (0,), 1, 1000),
        replace(node("read", Kind.FUSED, Half.FORWARD, (1,), 2, 1000), moves=moves),
        node("loss", Kind.ALONE, Half.FORWARD, (2,), 3, 4),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 4, 0),
        node("gradient", Kind.ALONE, Half.BACKWARD, (4,), 5, 4),
    )
    joint = Joint(nodes, frozenset([3]), frozenset([5]))
    return predict(joint, frozenset(), rates_of(joint)).peak_bytes


def test_nothing_is_written_over_what_is_read_by_index() -> None:
    assert written_over(moves=False) < 2000 <= written_over(moves=True)


def test_a_kernel_holds_what_it_reads_until_all_is_computed() -> None:
    """Two results of one kernel, of another size than what both read."""
    nodes = (
        node("input", Kind.INPUT, Half.FORWARD, (), 0, 0),
        node("scores", Kind.ALONE, Half.FORWARD, (0,), 1, 1000),
        node("wide", Kind.FUSED, Half.FORWARD, (1,), 2, 1000),
        replace(node("narrow", Kind.FUSED, Half.FORWARD, (1,), 3, 500), elements=1000 // 4),
        node("loss", Kind.ALONE, Half.FORWARD, (2, 3), 4, 4),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 5, 0),
        node("gradient", Kind.ALONE, Half.BACKWARD, (5,), 6, 4),
    )
    joint = Joint(nodes, frozenset([4]), frozenset([6]))
    moments = predict(joint, frozenset(), rates_of(joint)).moments
    live = {joint.nodes[moment.node].name: moment.live_bytes for moment in moments}
    # The wide one is written over the scores, so both and the narrow one are all there is.
    assert (live["wide"], live["narrow"]) == (1000, 1500)


def test_random_numbers_that_kernels_read_in_turn_are_in_memory() -> None:
    """The second cannot be one with the first, which what it reads is made of."""
    joint = drawn_and_read_twice(between=2, in_turn=True)
    assert predict(joint, frozenset(), rates_of(joint)).in_memory == {1}


def test_random_numbers_that_are_summed_over_columns_are_in_memory() -> None:
    """Such a sum is made piece by piece, in a kernel of its own."""
    joint = drawn_and_read_twice(between=2, last=Kind.SUM)
    assert predict(joint, frozenset(), rates_of(joint)).in_memory == {1}


def test_what_is_computed_once_counts_as_one_read() -> None:
    """A normalized image reads five tensors and is computed once; the mask made of it reads that and a gradient."""
    small = [node(f"of_channels_{number}", Kind.INPUT, Half.FORWARD, (), number, 0) for number in range(4)]
    nodes = (
        *small,
        node("image", Kind.ALONE, Half.FORWARD, (0,), 4, 1000),
        node("normalized", Kind.FUSED, Half.FREE, (0, 1, 2, 3, 4), 5, 1000),
        node("loss", Kind.SUM, Half.FORWARD, (4,), 6, 4),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 7, 0),
        node("gradient", Kind.ALONE, Half.BACKWARD, (7,), 8, 1000),
        node("below", Kind.FUSED, Half.BACKWARD, (5,), 9, 1000),
        node("above", Kind.FUSED, Half.BACKWARD, (5,), 10, 1000),
        node("masked", Kind.FUSED, Half.BACKWARD, (8, 9, 10), 11, 1000),
        node("first", Kind.SUM, Half.BACKWARD, (11,), 12, 100),
        node("product", Kind.ALONE, Half.BACKWARD, (12,), 13, 100),
        node("second", Kind.SUM, Half.BACKWARD, (4, 11, 13), 14, 100),
    )
    joint = Joint(nodes, frozenset([6]), frozenset([14]))
    moments = {moment.node: moment.live_bytes for moment in predict(joint, frozenset([4]), rates_of(joint)).moments}
    assert moments[5] - moments[8] == 1000, "it is in memory"
    assert moments[11] == moments[5], "what is made of it is not"


def test_a_scattered_gradient_is_in_memory_before_it_is_added_to() -> None:
    class Tied(nn.Module):
        """Tokens are looked up in the matrix that they are compared with."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return (self.words(tokens) @ self.words.weight.T).square().mean()

    joint = uncut_of(Tied(), torch.randint(50, (4, 6))).joint
    scattered = [number for number, item in enumerate(joint.nodes) if "index_put" in item.target]
    assert scattered and all(joint.nodes[number].in_pieces for number in scattered)
    assert set(scattered) <= set(contract(joint, rates_of(joint)).node_of)


def joined_from(target: str) -> Joint:
    """Backward makes a tensor as large as the one that it is made of, which ends there."""
    nodes = (
        node("input", Kind.INPUT, Half.FORWARD, (), 0, 0),
        node("loss", Kind.ALONE, Half.FORWARD, (0,), 1, 4),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 2, 0),
        node("product", Kind.ALONE, Half.BACKWARD, (2,), 3, 1000),
        replace(node("made", Kind.FUSED, Half.BACKWARD, (3,), 4, 1000), target=target),
        node("gradient", Kind.ALONE, Half.BACKWARD, (4,), 5, 4),
    )
    return Joint(nodes, frozenset([1]), frozenset([5]))


def test_what_is_concatenated_lies_beside_what_it_is_made_of() -> None:
    """The halves of a gated layer's gradient are each computed of both halves of its result."""
    alike, turned = joined_from("aten.mul.Tensor"), joined_from("aten.cat.default")
    assert peak_at(alike, predict(alike, frozenset(), rates_of(alike)), "made") == 1004
    assert peak_at(turned, predict(turned, frozenset(), rates_of(turned)), "made") == 2004


def test_a_row_sum_that_is_scattered_does_not_hold_what_was_summed_up() -> None:
    nodes = (
        node("input", Kind.INPUT, Half.FORWARD, (), 0, 0),
        node("loss", Kind.ALONE, Half.FORWARD, (0,), 1, 4),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 2, 0),
        node("product", Kind.ALONE, Half.BACKWARD, (2,), 3, 1000),
        replace(node("sum", Kind.SUM, Half.BACKWARD, (3,), 4, 8), sums_rows=True),
        node("other", Kind.ALONE, Half.BACKWARD, (2,), 5, 500),
        replace(node("scattered", Kind.FUSED, Half.BACKWARD, (4,), 6, 40), target="aten.index_put.default"),
    )
    joint = Joint(nodes, frozenset([1]), frozenset([5, 6]))
    assert peak_at(joint, predict(joint, frozenset(), rates_of(joint)), "other") == 4 + 8 + 500


def test_a_kernel_does_not_read_what_it_writes() -> None:
    """Two results of one kernel, of which one is computed from the other."""
    nodes = (
        node("input", Kind.INPUT, Half.FORWARD, (), 0, 0),
        node("product", Kind.ALONE, Half.FORWARD, (0,), 1, 1000),
        node("first", Kind.FUSED, Half.FORWARD, (1,), 2, 1000),
        node("second", Kind.FUSED, Half.FORWARD, (2,), 3, 1000),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 4, 0),
        node("grad", Kind.ALONE, Half.BACKWARD, (4, 2), 5, 100),
    )
    joint = Joint(nodes, frozenset([3]), frozenset([5]))
    rates = rates_of(joint)
    alone = sum(rates.alone_ns.values())
    taken = predict(joint, frozenset([2]), rates).time_ns - alone
    assert taken == rates.kernel_ns + 3000 / rates.bytes_per_ns


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"is_random": True}, "random_bytes"),
        ({"is_slow": True}, "slow_bytes"),
        ({"kind": Kind.SUM, "sums_rows": True}, "summed_bytes"),
    ],
)
def test_computing_takes_time_beside_moving(changes: dict, rate: str) -> None:
    nodes = (
        node("input", Kind.INPUT, Half.FORWARD, (), 0, 0),
        node("product", Kind.ALONE, Half.FORWARD, (0,), 1, 1000),
        replace(node("computed", Kind.FUSED, Half.FORWARD, (1,), 2, 1000), **changes),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 3, 0),
        node("grad", Kind.ALONE, Half.BACKWARD, (3, 2), 4, 100),
    )
    joint = Joint(nodes, frozenset([2]), frozenset([4]))
    rates = replace(rates_of(joint), random_bytes=0.0)
    dearer = replace(rates, **{rate: 8.0})
    before, after = (predict(joint, frozenset(), item).time_ns for item in (rates, dearer))
    assert after - before == 2 * 8.0 * 250 / rates.bytes_per_ns, "in forward and again in backward"
    graphs = [contract(joint, item).costs.time_ns for item in (rates, dearer)]
    assert sum(graphs[1]) > sum(graphs[0])


def test_sums_count_as_one_read_each_whoever_computes_them() -> None:
    """Rows that are normalized read two vectors, the rows and two of their sums: that is computed once for both."""
    sums = (node(name, Kind.SUM, Half.FREE, (2,), 3 + at, 40) for at, name in enumerate(("mean", "deviation")))
    nodes = (
        node("scale", Kind.INPUT, Half.FORWARD, (), 0, 0),
        node("shift", Kind.INPUT, Half.FORWARD, (), 1, 0),
        node("rows", Kind.ALONE, Half.FORWARD, (0,), 2, 1000),
        *(replace(item, sums_rows=True) for item in sums),
        node("normalized", Kind.FUSED, Half.FREE, (0, 1, 2, 3, 4), 5, 1000),
        node("loss", Kind.SUM, Half.FORWARD, (2,), 6, 4),
        node("tangents", Kind.INPUT, Half.BACKWARD, (), 7, 0),
        node("gradient", Kind.FUSED, Half.BACKWARD, (5, 7), 8, 1000),
        node("product", Kind.ALONE, Half.BACKWARD, (8,), 9, 1000),
        node("total", Kind.SUM, Half.BACKWARD, (5,), 10, 100),
    )
    joint = Joint(nodes, frozenset([6]), frozenset([9, 10]))
    assert 5 in predict(joint, frozenset([2]), rates_of(joint)).in_memory
