"""What is read of the kernels in a wrapper's text."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from remat.inductor.kernels.text import KernelText, read_kernels

POINTWISE = """
# Topologically Sorted Source Nodes: [gelu, drop], Original ATen: [aten.gelu]
# Source node to ATen node mapping:
#   gelu => mul, erf
# Graph fragment:
#   %inductor_seeds_default : Tensor "i64[4][1]cuda:0" = PlaceHolder[target=inductor_seeds_default]
#   %mm : Tensor "bf16[8, 16][16, 1]cuda:0" = PlaceHolder[target=mm]
#   %erf : Tensor "f32[8, 16][16, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.erf.default]()
#   %mul : Tensor "f32[8, 16][16, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor]()
#   return %mul
triton_poi_fused_gelu_0 = async_compile.triton('triton_poi_fused_gelu_0', \'\'\'
@triton.jit
def triton_poi_fused_gelu_0(in_out_ptr0, in_out_ptr1, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 128
\'\'\', device_str='cuda')
"""
LOOK_UP = """
# Graph fragment:
#   %tokens : Tensor "i64[8][1]cuda:0" = PlaceHolder[target=tokens]
#   %rows : Tensor "f32[8, 16][16, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.embedding.default]()
triton_poi_fused_embedding_1 = async_compile.triton('triton_poi_fused_embedding_1', \'\'\'
def triton_poi_fused_embedding_1(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
\'\'\', device_str='cuda')
"""


def test_nodes_and_arguments_of_a_kernel() -> None:
    assert read_kernels(POINTWISE) == {"triton_poi_fused_gelu_0": KernelText(("erf", "mul"), in_place=2)}


def test_nodes_are_of_the_kernel_below_them() -> None:
    found = read_kernels(POINTWISE + LOOK_UP)
    assert found["triton_poi_fused_embedding_1"].nodes == ("rows",)
    assert found["triton_poi_fused_gelu_0"].nodes == ("erf", "mul")


def test_indices_are_data_but_seeds_and_counted_ones_are_not() -> None:
    assert read_kernels(LOOK_UP)["triton_poi_fused_embedding_1"].goes_by_index
    seeded = LOOK_UP.replace("%tokens", "%inductor_seeds_default_3")
    assert not read_kernels(seeded)["triton_poi_fused_embedding_1"].goes_by_index


def test_blocks_that_count_each_other_are_seen() -> None:
    counted = POINTWISE.replace("in_ptr0, xnumel", "sem_ptr, in_ptr0, xnumel")
    assert read_kernels(counted)["triton_poi_fused_gelu_0"].counts_blocks


def test_code_of_a_cpu_has_none() -> None:
    assert read_kernels("cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], '''\n''')\n") == {}
