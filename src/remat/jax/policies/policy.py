"""`remat.jax.policy`: a policy for `jax.checkpoint` and everything that takes one, chosen for a budget.

In: a loss, with or without checkpoints of its own, its arguments and a budget. Out: a `ChosenPolicy`, which is itself a
policy: hand it to `jax.checkpoint`, `flax.linen.remat`, `nnx.remat`, `eqx.filter_checkpoint` or `haiku.remat`. What XLA
needs with nothing saved tells what there is to spend; the choice is compiled, and corrected once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from remat.core.budget import BudgetUnit, format_bytes, parse_budget
from remat.core.whole_file import replace_file
from remat.errors import InfeasibleBudget, RematError
from remat.jax import _compat
from remat.jax.costs.compiled import compile_step, compiler_options, default_device, memory_of
from remat.jax.costs.timing import run_ns, stopwatch
from remat.jax.graph.capture import trace
from remat.jax.graph.leaves import Leaves
from remat.jax.loop import FlatStep, Model, model_of, plain_memory, plain_pull
from remat.jax.planning import FlatFunction, allowed_bytes, step_of
from remat.jax.policies.choices import KeptAt, Kind, PolicyChoice, forwards_of, frontier, kinds_of
from remat.jax.policies.regions import regions_of, under_policy

MOST_COMPILATIONS = 3
HOST_KIND = "pinned_host"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ChosenPolicy:
    """Which values a checkpointed function saves; callable as `jax.checkpoint` calls its policies."""

    places: tuple[tuple[Kind, KeptAt], ...]
    budget_bytes: int
    predicted_peak: int
    """What XLA says of the compiled step under this policy: arguments, results and temporaries."""
    compilations: int = 0
    _rule: Callable[..., Any] = field(default=lambda *given, **params: False, repr=False, compare=False)

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        return self._rule(primitive, *avals, **params)

    @property
    def saved(self) -> tuple[str, ...]:
        """Names, or primitives with what they read."""
        return self._at(KeptAt.DEVICE)

    @property
    def offloaded(self) -> tuple[str, ...]:
        return self._at(KeptAt.OFFLOAD)

    @property
    def recomputed(self) -> tuple[str, ...]:
        return self._at(KeptAt.REMAT)

    def _at(self, wanted: KeptAt) -> tuple[str, ...]:
        return tuple(_called(kind) for kind, place in self.places if place is wanted)

    def maxtext(self) -> str:
        """MaxText's custom policy as YAML: a place for each name."""
        names = [(kind[1], place) for kind, place in self.places if kind[0] == "name"]
        if not names:
            raise RematError("MaxText's settings are by name, and the function names nothing; use checkpoint_name.")
        rows = [f"{name}: '{place.value}'" for name, place in names]
        return "\n".join(["remat_policy: 'custom'", *rows, ""])

    def save_maxtext(self, path: str | Path) -> Path:
        """Write `maxtext()` to a file, to be given after base.yml."""
        replace_file(Path(path), self.maxtext().encode())
        return Path(path)


def policy(
    function: Callable[..., Any],
    *args: Any,
    budget: str | float,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    offload: bool = False,
    **kwargs: Any,
) -> ChosenPolicy:
    """What to save wherever `function` checkpoints, or of all of it where it does not, so that its step fits.

    With `offload`, values with names may also wait in the host's memory. A budget as "0.5x" is of the temporaries of
    the function as it is given.
    """
    leaves = Leaves.of(args, kwargs)
    flat = FlatFunction(function, leaves, has_aux)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    chosen = leaves.chosen(numbers)
    traced = trace(flat, leaves.avals)
    step = step_of(flat, chosen, compiler_options(), plan_scans=False)
    model = model_of(step, stopwatch(default_device(), 0.0))
    asked = parse_budget(budget)
    plain = plain_memory(step, model) if asked.unit is BudgetUnit.PLAIN_FRACTION else None
    allowed = allowed_bytes(model, asked, plain)
    forwards = forwards_of(regions_of(traced), stopwatch(default_device()))
    kinds = kinds_of(forwards)
    named = bool(kinds) and kinds[0][0] == "name"
    if offload and not named:
        raise RematError(
            "Only values with names can be offloaded; give them one with jax.ad_checkpoint.checkpoint_name."
        )
    choices = frontier(forwards, kinds, _host_rate() if offload else None)
    return _searched(_Tries(traced, step, model, allowed), choices)


@dataclass(slots=True)
class _Tries:
    traced: Any
    step: FlatStep
    model: Model
    allowed: int
    count: int = 0

    def temporaries(self, choice: PolicyChoice) -> int:
        """What XLA needs under a choice."""
        self.count += 1
        function = under_policy(self.traced, rule_of(choice))
        changed = FlatStep(function, function, self.step.avals, self.step.wanted, options=self.step.options)
        compiled = compile_step(
            plain_pull(changed, self.model), self.step.compiled_for, self.model.cotangents(), self.step.options
        )
        return int(memory_of(compiled).temporary_bytes)


def _searched(tries: _Tries, choices: Sequence[PolicyChoice]) -> ChosenPolicy:
    """The fastest choice that fits, by what the leanest needs and a correction."""
    leanest, used = choices[0], tries.temporaries(choices[0])
    seen = [(leanest, used)]
    beyond = used - leanest.saved_bytes
    while tries.count < MOST_COMPILATIONS:
        fitting = [choice for choice in choices if choice.saved_bytes + beyond <= tries.allowed]
        # Where all is made again before backward, saving something can need less.
        found = fitting[-1] if fitting else choices[(len(choices) - 1) // tries.count]
        if any(found.places == choice.places for choice, _ in seen):
            break
        used = tries.temporaries(found)
        seen.append((found, used))
        beyond = used - found.saved_bytes
    resident = tries.model.resident_total
    fits = [(choice, used) for choice, used in seen if used <= tries.allowed]
    if not fits:
        raise _too_small(resident + tries.allowed, resident + min(used for _, used in seen))
    best, used = min(fits, key=lambda item: item[0].time_ns)
    return ChosenPolicy(best.places, resident + tries.allowed, resident + used, tries.count, _rule=rule_of(best))


def _too_small(asked: int, least: int) -> InfeasibleBudget:
    return InfeasibleBudget(
        f"Budget {format_bytes(asked)} is below the {format_bytes(least)} that the step needs under the leanest policy "
        "that was compiled; raise the budget, checkpoint smaller parts, or use remat.jax.optimize.",
        least,
    )


def rule_of(choice: PolicyChoice) -> Callable[..., Any]:
    """The choice as a policy of jax."""
    names = {place: [kind[1] for kind, at in choice.places if at is place and kind[0] == "name"] for place in KeptAt}
    if names[KeptAt.OFFLOAD]:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=names[KeptAt.DEVICE],
            names_which_can_be_offloaded=names[KeptAt.OFFLOAD],
            offload_src="device",
            offload_dst=HOST_KIND,
        )
    if names[KeptAt.DEVICE] or names[KeptAt.REMAT]:
        return jax.checkpoint_policies.save_only_these_names(*names[KeptAt.DEVICE])
    saved = frozenset(kind for kind, place in choice.places if place is KeptAt.DEVICE)

    def rule(primitive: Any, *avals: Any, **params: Any) -> bool:
        return (primitive.name, tuple(map(_compat.described, avals))) in saved

    return rule


def _called(kind: Kind) -> str:
    return str(kind[1]) if kind[0] == "name" else f"{kind[0]}({', '.join(kind[1])})"


def _host_rate() -> float:
    """Bytes that go to the host in a nanosecond; refused where jax has no memory for that."""
    device = default_device()
    if HOST_KIND not in {memory.kind for memory in device.addressable_memories()}:
        raise RematError(f"This jax backend has no {HOST_KIND} memory to offload to; leave offload out.")
    count = 1 << 24
    host = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST_KIND)
    taken = run_ns(lambda x: jax.device_put(x, host), [jax.ShapeDtypeStruct((count,), jnp.float32)])
    return 4 * count / max(taken, 1.0)
