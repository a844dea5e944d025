"""Who plans together: the ranks that an engine has a step share its gradients or its parameters with.

In: a step and, at its call, the wrapper that runs it. Out: an `Agreement`. A step that no engine knows of is planned by
its rank alone, as it would be without others; so is one whose other ranks are only pretended.
"""

from __future__ import annotations

from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from remat.distributed.agreement.agreed import Agreement, Alone, Together
from remat.distributed.agreement.processes import introduce_process
from remat.distributed.agreement.ranks import Ranks
from remat.pytorch._compat.distributed import (
    gathering_groups,
    group_of_parallel,
    is_pretended,
    meshes_of,
    parallel_at_work,
    store_of_job,
    timeout_of,
)
from remat.pytorch.reach import reachable_modules


def agreement_for(step: Any) -> Agreement:
    """With whom the step that is called now is planned."""
    if not distributed.is_available() or not distributed.is_initialized():
        return Alone()
    members = _members(step) if distributed.get_world_size() > 1 else ()
    if len(members) < 2 or distributed.get_rank() not in members:
        return Alone()
    if is_pretended():
        return Alone(len(members))
    name = "-".join(map(str, members)) if len(members) < distributed.get_world_size() else "all"
    store = distributed.PrefixStore(f"remat/{name}", store_of_job())
    place = members.index(distributed.get_rank())
    return Together(Ranks(store, place, members, timeout_of(distributed.group.WORLD), _job_store()))


def group_ranks(group: Any, purpose: str) -> Ranks | None:
    """The ranks of a process group, to talk for a purpose; None where nobody else is there, or only pretended."""
    if not distributed.is_available() or not distributed.is_initialized() or is_pretended():
        return None
    members = tuple(distributed.get_process_group_ranks(group))
    if len(members) < 2:
        return None
    store = distributed.PrefixStore(f"remat/{purpose}/{'-'.join(map(str, members))}", store_of_job())
    return Ranks(store, members.index(distributed.get_rank()), members, timeout_of(group), _job_store())


def introduce() -> None:
    """Say which process this rank is, as soon as it may be waited for: it may end before it comes to plan."""
    if distributed.is_available() and distributed.is_initialized() and not is_pretended():
        introduce_process(_job_store(), distributed.get_rank())


def _job_store() -> Any:
    return distributed.PrefixStore("remat", store_of_job())


def _members(step: Any) -> tuple[int, ...]:
    modules = reachable_modules(step)
    found: set[int] = set()
    around = (item for item in (parallel_at_work(), *modules) if isinstance(item, DistributedDataParallel))
    for parallel in around:
        found.update(distributed.get_process_group_ranks(group_of_parallel(parallel)))
    for mesh in (mesh for module in modules if isinstance(module, nn.Module) for mesh in meshes_of(module)):
        found.update(mesh.mesh.flatten().tolist())
    for group in (group for module in modules if isinstance(module, nn.Module) for group in gathering_groups(module)):
        found.update(distributed.get_process_group_ranks(group))
    return tuple(sorted(found))
