"""What torch.distributed and the engines on it tell only by private names; tried on torch 2.11 to 2.13."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

LET_GO_S = 0.003
"""For a thread of gloo to be given a core after its collective."""


def store_of_job() -> Any:
    """The key-value store that all ranks of the job share."""
    return distributed.distributed_c10d._get_default_store()


def timeout_of(group: Any) -> float:
    """Seconds after which a collective of the group gives up."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout = getattr(options, "_timeout", None) or distributed.default_pg_timeout
    return float(timeout.total_seconds())


def parallel_at_work() -> DistributedDataParallel | None:
    """The wrapper whose forward runs now, if one does."""
    return DistributedDataParallel._active_ddp_module


def bucket_bytes(parallel: DistributedDataParallel) -> int:
    """What a wrapper keeps to reduce gradients in; where these are views of it and there, they count by themselves."""
    reduced = [item for item in parallel._module_parameters if item.requires_grad]
    if parallel.gradient_as_bucket_view and any(item.grad is not None for item in reduced):
        return 0
    return sum(item.numel() * item.element_size() for item in reduced)


def group_of_parallel(parallel: DistributedDataParallel) -> Any:
    return parallel.process_group


def sharded_states(module: nn.Module) -> list[Any]:
    """What FSDP2 knows of the modules within `module` that it shards."""
    if not distributed.is_available() or not distributed.is_initialized():
        return []
    from torch.distributed._composable_state import _get_module_state
    from torch.distributed.fsdp import FSDPModule

    sharded = (item for item in module.modules() if isinstance(item, FSDPModule))
    found = (_get_module_state(item) for item in sharded)
    return list({id(state): state for state in found if state is not None}.values())


def sharded_modules(module: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards by themselves, in order, the whole first."""
    if not distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [item for item in module.modules() if isinstance(item, FSDPModule)]


def parameter_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters, which are gathered and freed together."""
    for state in sharded_states(module):
        yield from (
            state._fsdp_param_groups
            if hasattr(state, "_fsdp_param_groups")
            else filter(None, [state._fsdp_param_group])
        )


def shards_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP2 spreads over ranks, as this rank holds them all the time."""
    return [item.sharded_param for group in parameter_groups(module) for item in group.fsdp_params]


def gathered_from(module: nn.Module) -> list[torch.Tensor]:
    """What FSDP2 gathers them into for a while: the same storages in every step, most of the time without bytes."""
    found: list[torch.Tensor] = []
    for group in parameter_groups(module):
        for item in group.fsdp_params:
            whole = getattr(item, "_unsharded_param", None)
            found.extend(part for part in (whole, *getattr(item, "all_gather_outputs", ())) if part is not None)
    return found


def group_bytes(module: nn.Module) -> list[int]:
    """For each of FSDP2's groups, what its parameters or gradients take in one piece."""
    return [
        sum(item.sharded_param.numel() * item.sharded_param.element_size() for item in group.fsdp_params)
        for group in parameter_groups(module)
    ]


def frees_after_forward(module: nn.Module) -> list[bool]:
    """For each of FSDP2's groups, whether it is gathered again in backward."""
    return [group.post_forward_mesh_info is not None for group in parameter_groups(module)]


def gathers_of(module: nn.Module) -> dict[int, tuple[int, bool]]:
    """FSDP2's groups by identity: what each takes in one piece, and whether it is freed after forward."""
    groups = list(parameter_groups(module))
    facts = zip(group_bytes(module), frees_after_forward(module), strict=True)
    return dict(zip(map(id, groups), facts, strict=True))


def gathering_groups(module: nn.Module) -> list[Any]:
    """The groups over which modules of Remat's own gather parameters in the graph."""
    found = (getattr(item, "gathers_over", None) for item in module.modules())
    return list({id(group): group for group in found if group is not None}.values())


def gathered_in_graph(module: nn.Module) -> list[int]:
    """Bytes of each parameter that such modules gather."""
    return [item.whole_bytes for item in module.modules() if hasattr(item, "gathers_over")]


def meshes_of(module: nn.Module) -> list[Any]:
    """The meshes of ranks over which the parameters of a module are spread."""
    from torch.distributed.tensor import DTensor

    spread = (item for item in module.parameters() if isinstance(item, DTensor))
    return list({id(item.device_mesh): item.device_mesh for item in spread}.values())


@functools.cache
def wrapping_tensors() -> tuple[type[torch.Tensor], ...]:
    """Classes of tensors that are spread over ranks and run ops by those of their parts."""
    if not distributed.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return (DTensor,)


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class with the same parameters, buffers, children and hooks.

    `copy.copy` would have FSDP2 call the constructor of the class that it has replaced.
    """
    if not distributed.is_available():
        return copy.copy(module)
    from torch.distributed._composable_state import _get_module_state, _insert_module_state
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return copy.copy(module)
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    state = _get_module_state(module)
    if state is not None:
        _insert_module_state(copied, state)
    return copied


def pause_after_waits(while_running: Callable[[], bool]) -> Callable[[], None]:
    """Meanwhile, until what is returned is called, whoever has waited for a collective on CPUs waits a little longer.

    A thread of gloo lets go of a collective's buffers a moment after those who wait for it go on. If it is the last to,
    it frees them where torch's profiler, which belongs to a thread, never sees it, and they would count to the end.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return lambda: None
    waiting: Any = distributed.Work
    before = waiting.wait

    @functools.wraps(before)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        done = before(work, *args, **kwargs)
        if while_running():
            time.sleep(LET_GO_S)
        return done

    waiting.wait = wait

    def end() -> None:
        waiting.wait = before

    return end


def is_pretended() -> bool:
    """Whether the other ranks of this job are only told to be there."""
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_backend() == "fake"


def pretend_ranks(count: int) -> None:
    """Make this process rank 0 of a job whose other ranks answer at once and send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)


def gather_with_gradient(part: torch.Tensor, group: Any) -> torch.Tensor:
    """All parts in one tensor, as an op that can be traced; its gradient is scattered, and averaged over ranks."""
    from torch.distributed import _functional_collectives as collectives

    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    whole: torch.Tensor = gather(part, 0, group)
    return _Averaged.apply(whole, distributed.get_world_size(group))


class _Averaged(torch.autograd.Function):
    """What every rank reads; gradients, which will be added up, are divided first."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / ctx.ranks, None


def ranks_of_group(name: str) -> int:
    """How many ranks there are in the group of a name."""
    return int(distributed.distributed_c10d._resolve_process_group(name).size())
