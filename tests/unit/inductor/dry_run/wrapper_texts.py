"""Small wrappers as Inductor writes them for CUDA: the parts around `call`, and bodies of every form it uses.

`module` sets a body into the text of torch 2.11 or 2.13; both print the same statements in `call`, and differ in how
they check inputs and in what they import.
"""

from __future__ import annotations

import textwrap

_HEAD = """
# AOT ID: ['0_forward']
from ctypes import c_void_p, c_long, c_int
import torch
import math
import random
import os
import tempfile
from math import inf, nan
from cmath import nanj
from torch._inductor.hooks import run_intermediate_hooks
from torch._inductor.utils import maybe_profile
from torch._inductor.codegen.memory_planning import _align as align
from torch import device, empty_strided
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
import triton
import triton.language as tl
from torch._inductor.runtime.triton_heuristics import start_graph, end_graph
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
{imports}
aten = torch.ops.aten
inductor_ops = torch.ops.inductor
_quantized = torch.ops._quantized
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
assert_alignment = torch._C._dynamo.guards.assert_alignment
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
empty_strided_cpu_pinned = torch._C._dynamo.guards._empty_strided_cpu_pinned
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
empty_strided_xpu = torch._C._dynamo.guards._empty_strided_xpu
empty_strided_mtia = torch._C._dynamo.guards._empty_strided_mtia
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
alloc_from_pool = torch.ops.inductor._alloc_from_pool
async_compile = AsyncCompile()
empty_strided_p2p = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p
"""

_KERNEL = """
# kernel path: /tmp/torchinductor/{name}.py
# Topologically Sorted Source Nodes: [gelu], Original ATen: [aten.gelu]
# Graph fragment:
#   %gelu : Tensor = call_function[target=torch.ops.aten.gelu.default](args = (%mm,), kwargs = {{}})
{name} = async_compile.triton('{name}', '''
import triton
import triton.language as tl

@triton.jit
def {name}(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
"""

_WAIT = """
async_compile.wait(globals())
del async_compile
"""

_RUNNER = """
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def recursively_apply_fns(self, fns):
        new_callables = []
        for fn, c in zip(fns, self.partitions):
            new_callables.append(fn(c))
        self.partitions = new_callables

    def call(self, args):
"""

_TAIL = """
runner = Runner(partitions=[{partitions}])
call = runner.call
recursively_apply_fns = runner.recursively_apply_fns
"""

_HARNESS = """
def get_args():
    from torch._dynamo.testing import rand_strided
    primals_1 = rand_strided((8, ), (1, ), device='cuda:0', dtype=torch.float32)
    return [primals_1]


def benchmark_compiled_module(args, times=10, repeat=10):
    from torch._inductor.utils import print_performance
    fn = lambda: call(list(args))
    return print_performance(fn, times=times, repeat=repeat, device='cuda')


if __name__ == "__main__":
    from torch._inductor.wrapper_benchmark import compiled_module_main
    args = get_args()
    compiled_module_main('None', benchmark_compiled_module)
"""


def module(
    body: str,
    *,
    kernels: tuple[str, ...] = (),
    functions: str = "",
    partitions: tuple[str, ...] = (),
    header: str = "",
    is_partitioned: bool = True,
    imports: str = "",
) -> str:
    """The whole text; `body` is what stands in `call`, without indentation."""
    start = _RUNNER if is_partitioned else "\ndef call(args):\n"
    parts = [
        _HEAD.format(imports=imports),
        header,
        *(_KERNEL.format(name=name) for name in kernels),
        functions,
        _WAIT,
        start + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * (8 if is_partitioned else 4)) + "\n",
        _TAIL.format(partitions=", ".join([*partitions, ""])) if is_partitioned else "",
        _HARNESS,
    ]
    return "\n".join(parts)


def _heads(name: str) -> str:
    """Queries, keys and values as views of one product."""
    return ", ".join(f"reinterpret_tensor({name}, (2, 4, 512, 64), (393216, 64, 768, 1), {at})" for at in (0, 256, 512))


_GRADIENT = "reinterpret_tensor(buf3, (2, 4, 512, 64), (131072, 64, 256, 1), 0)"
_SAVED = "getitem, getitem_1, None, None, 512, 512, 0.0, True, getitem_6, getitem_7, scale=0.125"
_FLASH = "torch.ops.aten._scaled_dot_product_flash_attention"

GPT_FORWARD = module(
    f"""
    primals_1, primals_2, primals_3 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((1024, 768), (768, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [qkv], Original ATen: [aten.mm]
        extern_kernels.mm(primals_1, reinterpret_tensor(primals_2, (256, 768), (1, 256), 0), out=buf0)
        del primals_2
        # Topologically Sorted Source Nodes: [attention], Original ATen: [aten._scaled_dot_product_flash_attention]
        buf1 = {_FLASH}.default({_heads("buf0")}, 0.0, True, scale=0.125)
        buf2 = buf1[0]
        assert_size_stride(buf2, (2, 4, 512, 64), (131072, 64, 256, 1), '{_FLASH}.default')
        assert_alignment(buf2, 16, '{_FLASH}.default')
        buf3 = buf1[1]
        buf4 = buf1[6]
        buf5 = buf1[7]
        del buf1
        buf6 = empty_strided_cuda((1, ), (1, ), torch.int64)
        # Topologically Sorted Source Nodes: [], Original ATen: []
        aten.randint.low_out(-9223372036854775808, 9223372036854775807, [1], out=buf6)
        buf7 = empty_strided_cuda((1024, 256), (256, 1), torch.bfloat16)
        buf8 = empty_strided_cuda((1024, 256), (256, 1), torch.bool)
        # Topologically Sorted Source Nodes: [gelu, dropout], Original ATen: [aten.gelu, aten.native_dropout]
        stream0 = get_raw_stream(0)
        triton_poi_fused_gelu_native_dropout_0.run(buf2, buf6, buf8, buf7, 0, 262144, stream=stream0)
        buf9 = empty_strided_cuda((1024, 256), (256, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [output], Original ATen: [aten.mm]
        extern_kernels.mm(buf7, primals_3, out=buf9)
        buf10 = empty_strided_cuda((), (), torch.float32)
        # Topologically Sorted Source Nodes: [loss], Original ATen: [aten.sum]
        stream0 = get_raw_stream(0)
        triton_red_fused_sum_1.run(buf9, buf10, 1, 262144, stream=stream0)
        del buf9
    return (buf10, primals_1, primals_3, buf0, buf2, buf3, buf4, buf5, buf8, buf7, )
    """,
    kernels=("triton_poi_fused_gelu_native_dropout_0", "triton_red_fused_sum_1"),
)

GPT_BACKWARD = module(
    f"""
    primals_1, primals_3, mm, getitem, getitem_1, getitem_6, getitem_7, gt, mul, tangents_1 = args
    args.clear()
    assert_size_stride(primals_1, (1024, 256), (256, 1))
    assert_size_stride(tangents_1, (), ())
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((1024, 256), (256, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [expand], Original ATen: [aten.expand]
        stream0 = get_raw_stream(0)
        triton_poi_fused_expand_0.run(tangents_1, buf0, 262144, stream=stream0)
        del tangents_1
        buf1 = empty_strided_cuda((256, 256), (256, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [mm_2], Original ATen: [aten.mm]
        extern_kernels.mm(reinterpret_tensor(mul, (256, 1024), (1, 256), 0), buf0, out=buf1)
        buf2 = mul; del mul  # reuse
        # Topologically Sorted Source Nodes: [mm_3], Original ATen: [aten.mm]
        extern_kernels.mm(buf0, reinterpret_tensor(primals_3, (256, 256), (1, 256), 0), out=buf2)
        del primals_3
        workspace_0 = empty_strided_cuda((65536, ), (1, ), torch.float32)
        workspace_0.zero_()
        buf3 = reinterpret_tensor(buf0, (2, 512, 4, 64), (131072, 256, 64, 1), 0); del buf0  # reuse
        # Topologically Sorted Source Nodes: [mul_1], Original ATen: [aten.native_dropout_backward]
        stream0 = get_raw_stream(0)
        triton_poi_fused_native_dropout_backward_1.run(buf2, gt, getitem, buf3, workspace_0, 262144, stream=stream0)
        buf4 = workspace_0[0 * 256 * 256 : (0 + 1) * 256 * 256].view(256, 256).sum(dim=0).to(torch.bfloat16)
        del gt
        del buf2
        # Topologically Sorted Source Nodes: [attention], Original ATen: [aten._scaled_dot_product_flash]
        buf5 = {_FLASH}_backward.default({_GRADIENT}, {_heads("mm")}, {_SAVED})
        del buf3
        del getitem
        del getitem_1
        del mm
        buf6 = buf5[0]
        buf7 = buf5[1]
        buf8 = buf5[2]
        del buf5
        buf9 = empty_strided_cuda((1024, 768), (768, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [cat], Original ATen: [aten.cat]
        stream0 = get_raw_stream(0)
        triton_poi_fused_cat_2.run(buf6, buf7, buf8, buf9, 786432, stream=stream0)
        del buf6
        del buf7
        del buf8
        buf10 = empty_strided_cuda((768, 256), (256, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [mm_4], Original ATen: [aten.mm]
        extern_kernels.mm(reinterpret_tensor(buf9, (768, 1024), (1, 768), 0), primals_1, out=buf10)
        del buf9
        del primals_1
    return (None, buf10, buf1, buf4, )
    """,
    kernels=("triton_poi_fused_expand_0", "triton_poi_fused_native_dropout_backward_1", "triton_poi_fused_cat_2"),
    is_partitioned=False,
)
