"""Dry runs of wrappers written for CUDA, against memory counted by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.unit.inductor.dry_run.wrapper_texts import GPT_BACKWARD, GPT_FORWARD, module

from remat.core.results.profile import Phase
from remat.inductor.dry_run.compiled import Compiled, saved_outputs
from remat.inductor.dry_run.run import DryRun, dry_run
from remat.inductor.dry_run.timeline import CannotFollow, KernelTimeline
from remat.pytorch._compat.fakes import FakeTensorMode

CUDA = torch.device("cuda:0")
MIB = 1 << 20
ROW = 512


def fakes(*kinds: tuple[tuple[int, ...], Any]) -> tuple[Any, ...]:
    with FakeTensorMode():
        return tuple(torch.empty(shape, dtype=dtype, device=CUDA) for shape, dtype in kinds)


def compiled(source: str, inputs: Sequence[Any], **more: Any) -> Compiled:
    names = tuple(f"primals_{place + 1}" for place in range(len(inputs)))
    defaults = dict(input_names=names, output_names=(), constants={}, is_backward=False)
    return Compiled(source, tuple(inputs), **{**defaults, **more})


def run(body: str, inputs: Sequence[Any], *, constants: Any = None, **parts: Any) -> KernelTimeline:
    return dry_run(compiled(module(body, **parts), inputs, constants=constants or {}), device=CUDA)


BF16, FP32 = torch.bfloat16, torch.float32
SAVED = ("primals_1", "primals_3", "mm", "getitem", "getitem_1", "getitem_6", "getitem_7", "gt", "mul")
FORWARD = compiled(
    GPT_FORWARD,
    fakes(((1024, 256), BF16), ((768, 256), BF16), ((256, 256), BF16)),
    output_names=("sum_1", *SAVED),
)
BACKWARD = compiled(
    GPT_BACKWARD,
    fakes(
        ((1024, 256), BF16),
        ((256, 256), BF16),
        ((1024, 768), BF16),
        ((2, 4, 512, 64), BF16),
        ((2, 4, 512), FP32),
        ((2,), torch.uint64),
        ((), torch.uint64),
        ((1024, 256), torch.bool),
        ((1024, 256), BF16),
        ((), FP32),
    ),
    input_names=(*SAVED, "tangents_1"),
    output_names=("", "mm_4", "mm_2", "sum_2"),
    is_backward=True,
)
QKV, HIDDEN, MASK, ROWS = 1024 * 768 * 2, 1024 * 256 * 2, 1024 * 256, 2 * 4 * 512 * 4
SAVED_BYTES = QKV + HIDDEN + ROWS + 2 * ROW + MASK + HIDDEN
SEEDS = ROW
LOSS = ROW


def live(timeline: KernelTimeline) -> list[int]:
    return [call.live_bytes for call in timeline.calls]


def test_counts_what_is_live_at_each_call_of_forward() -> None:
    timeline = dry_run(FORWARD, device=CUDA)
    attention = QKV + HIDDEN + ROWS + 2 * ROW
    assert live(timeline) == [
        QKV,
        attention,
        attention + SEEDS,
        attention + SEEDS + HIDDEN + MASK,
        attention + SEEDS + HIDDEN + MASK + HIDDEN,
        attention + SEEDS + HIDDEN + MASK + HIDDEN + LOSS,
    ]
    assert [call.name for call in timeline.calls] == [
        "extern_kernels.mm",
        "aten._scaled_dot_product_flash_attention.default",
        "aten.randint.low_out",
        "triton_poi_fused_gelu_native_dropout_0",
        "extern_kernels.mm",
        "triton_red_fused_sum_1",
    ]
    assert timeline.calls[3].origins == ("gelu", "dropout")
    assert timeline.calls[3].made_bytes == HIDDEN + MASK


def test_backward_drops_what_was_saved_as_it_goes() -> None:
    timeline = dry_run(FORWARD, BACKWARD, device=CUDA, resident_bytes=MIB)
    weight, workspace, bias = 256 * 256 * 2, 256 * 256 * 4, ROW
    assert timeline.boundary_bytes == MIB + LOSS + SAVED_BYTES
    backward = [call for call in timeline.calls if call.phase is Phase.BACKWARD]
    base = MIB + 2 * LOSS + SAVED_BYTES + HIDDEN
    # The last hidden state is written over, its mask and it are dropped, the workspace stays: no line deletes it.
    after = base + weight + workspace + bias - MASK - HIDDEN
    assert [call.live_bytes for call in backward] == [
        base,
        base + weight,
        base + weight,
        base + weight + workspace,
        base + weight + workspace,
        base + weight + workspace + 256 * 4,
        base + weight + workspace + 256 * 4 + bias,
        after + 3 * HIDDEN,
        after + 2 * HIDDEN - QKV - ROWS + QKV - HIDDEN,
        after - HIDDEN - QKV - ROWS + QKV - HIDDEN + 768 * 256 * 2,
    ]
    assert timeline.end_bytes == MIB + LOSS + 768 * 256 * 2 + weight + bias


def test_says_what_the_peak_is_made_of() -> None:
    timeline = dry_run(FORWARD, BACKWARD, device=CUDA, resident_bytes=MIB)
    peak = timeline.calls[timeline.peak_call]
    assert peak.name == "aten._scaled_dot_product_flash_attention_backward.default"
    assert timeline.resident_bytes + sum(buffer.size_bytes for buffer in timeline.alive) == timeline.peak_bytes
    made = {buffer.name: (buffer.made_by, buffer.phase, buffer.origins) for buffer in timeline.alive}
    assert made["mm"] == ("extern_kernels.mm", Phase.FORWARD, ("qkv",))
    assert made["getitem"][0] == "aten._scaled_dot_product_flash_attention.default"
    assert made["buf3"] == ("triton_poi_fused_native_dropout_backward_1", Phase.BACKWARD, ("mul_1",))
    assert made["tangents_1"] == ("autograd", Phase.BACKWARD, ())


def test_memory_that_backward_writes_over_belongs_to_the_call_that_does() -> None:
    timeline = dry_run(FORWARD, BACKWARD, device=CUDA)
    run = DryRun(CUDA)
    outputs = run.forward(FORWARD, run.given(FORWARD.inputs))
    args = [*outputs[1:], None]
    del outputs
    run.backward(BACKWARD, args)
    # The third call of backward is the last one in which the buffer is there under its new name.
    (place,) = (place for place, call in enumerate(timeline.calls) if call.origins == ("mm_3",))
    (reused,) = (buffer for buffer in run._alive_at(place) if buffer.name == "buf2")
    assert (reused.made_by, reused.phase) == ("extern_kernels.mm", Phase.FORWARD)


def test_outputs_that_the_caller_drops_are_gone_in_backward() -> None:
    everything = dry_run(FORWARD, BACKWARD, device=CUDA)
    dropped = dry_run(FORWARD, BACKWARD, device=CUDA, kept=())
    assert everything.end_bytes - dropped.end_bytes == LOSS


def test_a_large_gradient_that_comes_in_dies_where_the_code_drops_it() -> None:
    forward = """
    primals_1, = args
    args.clear()
    buf0 = empty_strided_cuda((1024, ), (1, ), torch.float32)
    triton_poi_fused_0.run(primals_1, buf0, 1024, stream=0)
    return (buf0, primals_1, )
    """
    backward = """
    primals_1, tangents_1 = args
    args.clear()
    buf0 = empty_strided_cuda((1024, ), (1, ), torch.float32)
    triton_poi_fused_0.run(tangents_1, buf0, 1024, stream=0)
    del tangents_1
    buf1 = empty_strided_cuda((1024, ), (1, ), torch.float32)
    triton_poi_fused_0.run(buf0, primals_1, buf1, 1024, stream=0)
    del buf0
    return (buf1, )
    """
    kernels = ("triton_poi_fused_0",)
    first = compiled(module(forward, kernels=kernels), fakes(((1024,), FP32)), output_names=("mul", "primals_1"))
    inputs = fakes(((1024,), FP32), ((1024,), FP32))
    second = compiled(module(backward, kernels=kernels), inputs, input_names=("primals_1", "tangents_1"))
    assert live(dry_run(first, second, device=CUDA, kept=())) == [4096, 8192, 8192]


def test_adds_the_workspace_of_library_kernels() -> None:
    def workspace_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        return MIB if name == "aten._scaled_dot_product_flash_attention_backward.default" else 0

    plain = dry_run(FORWARD, BACKWARD, device=CUDA)
    with_workspace = dry_run(FORWARD, BACKWARD, device=CUDA, workspace_of=workspace_of)
    assert with_workspace.peak_bytes == plain.peak_bytes + MIB


def test_the_workspace_function_sees_the_tensors() -> None:
    shapes: list[tuple[int, ...]] = []

    def workspace_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        shapes.extend(tuple(arg.shape) for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor))
        return 0

    dry_run(FORWARD, device=CUDA, workspace_of=workspace_of)
    assert shapes[:3] == [(1024, 256), (256, 768), (1024, 768)]


def test_follows_partitions() -> None:
    functions = """
def partition_0(args):
    primals_1, buf0 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf1 = empty_strided_cuda((1024, ), (1, ), torch.float32)
        stream0 = get_raw_stream(0)
        triton_poi_fused_0.run(primals_1, buf0, buf1, 1024, stream=stream0)
        del buf0
        buf2 = empty_strided_cuda((1024, ), (1, ), torch.float32)
        triton_poi_fused_0.run(buf1, buf2, 1024, stream=stream0)
        del buf1
    return (buf2, )
"""
    body = """
    primals_1, = args
    args.clear()
    buf0 = empty_strided_cuda((1024, ), (1, ), torch.float32)
    stream0 = get_raw_stream(0)
    triton_poi_fused_0.run(primals_1, buf0, 1024, stream=stream0)
    partition0_args = [primals_1, buf0]
    del primals_1, buf0
    (buf2,) = self.partitions[0](partition0_args)
    del partition0_args
    buf3 = empty_strided_cuda((1024, ), (1, ), torch.float32)
    triton_poi_fused_0.run(buf2, buf3, 1024, stream=stream0)
    return (buf3, )
    """
    timeline = run(
        body,
        fakes(((1024,), FP32)),
        functions=functions,
        partitions=("partition_0",),
        kernels=("triton_poi_fused_0",),
    )
    assert live(timeline) == [4096, 8192, 8192, 8192]


def test_follows_subgraphs() -> None:
    functions = """
def subgraph_0(args):
    arg0_1, = args
    args.clear()
    buf0 = empty_strided_cuda((1024, ), (1, ), torch.float32)
    triton_poi_fused_0.run(arg0_1, buf0, 1024, stream=get_raw_stream(0))
    return (buf0, )
"""
    body = """
    primals_1, = args
    args.clear()
    buf0 = [None] * 1
    subgraph_0_args = [primals_1]
    buf0 = subgraph_0(subgraph_0_args)
    buf1 = buf0[0]
    del buf0
    return (buf1, )
    """
    assert live(run(body, fakes(((1024,), FP32)), functions=functions, kernels=("triton_poi_fused_0",))) == [4096]


def test_follows_random_ops_that_keep_their_state() -> None:
    rng, op = "torch.ops.higher_order", "torch.ops.aten.bernoulli.p"
    body = f"""
    primals_1, fwd_rng_state_0 = args
    args.clear()
    buf0 = {rng}.graphsafe_run_with_rng_state({op}, primals_1, 0.5, rng_state=fwd_rng_state_0)
    assert_size_stride(buf0, (1024, ), (1, ), 'torch.ops.aten.bernoulli.p')
    buf1 = {rng}.run_and_save_rng_state({op}, buf0, 0.5)
    buf2 = buf1[0]
    buf3 = buf1[1]
    del buf1
    buf4 = {rng}.run_with_rng_state(buf2, {op}, buf0, 0.5)
    return (buf3, buf4, )
    """
    assert live(run(body, (*fakes(((1024,), FP32)), torch.Generator()))) == [4096, 8192, 12288]


def test_follows_mutated_inputs_hooks_streams_and_padded_allocations() -> None:
    body = """
    primals_1, s0 = args
    args.clear()
    primals_1_size = primals_1.size()
    s1 = primals_1_size[0]
    assert not primals_1.isnan().any().item()
    primals_1 = copy_if_misaligned(primals_1)
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        default_stream = torch.cuda.current_stream()
        stream1 = get_external_object_by_index(3)
        buf0 = empty_strided_cuda((s0, 24), (24, 1), torch.float32).as_strided((s0, 20), (24, 1))
        with stream1:
            raw_stream = get_raw_stream(0)
            triton_poi_fused_0.run(primals_1, buf0, s1, stream=raw_stream)
        run_intermediate_hooks('gelu', buf0)
        cuda_fused_1.cuda_fused_1(buf0, c_void_p(raw_stream))
        primals_1.copy_(reinterpret_tensor(buf0, (1024, ), (1, ), 0), False)
        buf1 = aten.view.dtype(reinterpret_tensor(buf0, (8, 24), (24, 1), 0), torch.int32)
        del buf0
        _d2h_event_buf1 = torch.Event()
        _d2h_event_buf1.record()
        _d2h_event_buf1.synchronize()
        desc0 = triton.tools.tensor_descriptor.TensorDescriptor.from_tensor(buf1, [8, 8])
        del buf1
        buf2 = empty_strided_cuda((128, ), (1, ), torch.float32)
        triton_poi_fused_0.run(desc0, buf2, 128, stream=raw_stream)
    return (buf2, )
    """
    imports = (
        "from torch._C._dynamo.guards import copy_if_misaligned\n"
        "from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index\n"
    )
    header = "cuda_fused_1 = async_compile.cuda(r'''...''', 'so')\n"
    timeline = run(body, (*fakes(((1024,), FP32)), 64), kernels=("triton_poi_fused_0",), header=header, imports=imports)
    # The descriptor keeps the padded buffer alive to the end.
    padded = 64 * 24 * 4
    named = {call.name: call.live_bytes for call in timeline.calls}
    assert named["cuda_fused_1"] == named["aten.copy_.default"] == padded
    assert named["triton_poi_fused_0"] == padded + ROW


def test_constants_cost_nothing() -> None:
    body = """
    primals_1, = args
    args.clear()
    buf0 = empty_strided_cuda((1024, ), (1, ), torch.float32)
    triton_poi_fused_0.run(primals_1, reinterpret_tensor(_tensor_constant0, (64, ), (1, ), 0), buf0, stream=0)
    return (buf0, )
    """
    (constant,) = fakes(((64,), FP32))
    header = "_tensor_constant0 = None  # device(type='cuda', index=0) torch.float32 (64,) (1,) 7f0\n"
    timeline = run(
        body,
        fakes(((1024,), FP32)),
        kernels=("triton_poi_fused_0",),
        header=header,
        constants={"_tensor_constant0": constant},
    )
    assert live(timeline) == [4096]


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("buf0 = triton_poi_fused_0.run(primals_1, stream=0)\nbuf1 = buf0[0]", "what triton_poi_fused_0 returns"),
        ("u0 = primals_1.item()", "value of a tensor"),
        ("if primals_1.item():\n    pass", "value of a tensor"),
        ("buf0 = empty_strided_p2p((8, ), (1, ), torch.float32)", "torch.distributed"),
        ("buf0 = torch.ops.higher_order.while_loop(primals_1)", "while_loop"),
        ("buf0 = something_new(primals_1)", "something_new"),
        ("assert_size_stride(primals_1, (512, ), (1, ), 'input')", "expects (512,)"),
        ("buf0 = extern_kernels.no_such_kernel(primals_1)", "no_such_kernel"),
    ],
)
def test_refuses_what_it_cannot_follow_and_names_the_line(statement: str, reason: str) -> None:
    lines = statement.replace("\n", "\n    ")
    body = f"""
    primals_1, = args
    args.clear()
    {lines}
    return (primals_1, )
    """
    with pytest.raises(CannotFollow) as refusal:
        run(body, fakes(((1,), FP32)), kernels=("triton_poi_fused_0",))
    assert reason in str(refusal.value)
    assert statement.splitlines()[-1].strip() in str(refusal.value) or statement.splitlines()[0] in str(refusal.value)


@pytest.mark.parametrize(
    "source",
    [
        "#include <torch/csrc/inductor/cpp_prefix.h>\nvoid call() {}",
        "import torch\n",
        "",
        "from torch._inductor.codecache import CppWrapperCodeCache\n"
        "inductor_entry = CppWrapperCodeCache.load_pybinding(['x'], 'y')\n"
        "call = inductor_entry\n",
    ],
)
def test_refuses_code_without_a_python_call(source: str) -> None:
    with pytest.raises(CannotFollow):
        dry_run(compiled(source, ()), device=CUDA)


def test_backward_may_take_generators_of_its_own() -> None:
    body = """
    bwd_rng_state_0, tangents_1 = args
    args.clear()
    buf0 = torch.ops.higher_order.graphsafe_run_with_rng_state(torch.ops.aten.clone.default, tangents_1, rng_state=0)
    return (buf0, )
    """
    inputs = (torch.Generator(), *fakes(((1024,), FP32)))
    backward = compiled(module(body), inputs, input_names=("bwd_rng_state_0", "tangents_1"))
    assert dry_run(FORWARD, backward, device=CUDA, kept=()).end_bytes == 4096


def test_states_of_generators_have_another_name_in_backward() -> None:
    state = torch.empty(16, dtype=torch.uint8)
    forward = compiled("", (), output_names=("loss", "mul", "getitem", "add"))
    names = ("mul", "rng_state_output_0", "add", "tangents_1")
    backward = compiled("", (state, state, state, torch.ones(())), input_names=names)
    assert saved_outputs(forward, backward) == [1, 2, 3, None]


def test_refuses_a_backward_that_takes_what_forward_does_not_return() -> None:
    other = compiled(GPT_FORWARD, FORWARD.inputs, output_names=("sum_1", *(f"x{name}" for name in SAVED)))
    with pytest.raises(CannotFollow, match="'primals_1', which forward does not return"):
        dry_run(other, BACKWARD, device=CUDA)


def test_the_allocator_may_hand_out_more_than_was_asked_for() -> None:
    assert dry_run(FORWARD, BACKWARD, device=CUDA).slack_bytes > 0
