"""What a rank is about to train, in words that can be compared, and how ranks differ in it.

In: what each rank says of itself. Out: a verdict for all of them: one sentence that refuses, one that warns, or none.
Ranks may be given batches of other shapes; in everything else they must be alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from remat.distributed.agreement.ranks import named


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one rank, in the order in which they are compared."""

    remat_version: str
    torch_version: str
    device: str
    ranks: str
    """How many there are, and along which dimensions."""
    budget: str
    settings: str
    """Solver, seed, time limit and what the budget bounds."""
    plan: str
    """The hash of a plan that was given; empty where there is none."""
    parameters: str
    shapes: str
    """Of what the step is called with."""
    model: str
    """The hash of the first graph that was captured."""


_WORDS = {
    "remat_version": "version of Remat",
    "torch_version": "version of torch",
    "device": "device",
    "ranks": "number of ranks",
    "budget": "budget",
    "settings": "settings",
    "plan": "plan",
    "parameters": "parameters",
    "shapes": "shapes",
    "model": "model",
}
_LONGEST = 60


def judge(said: Sequence[dict[str, Any] | None], members: Sequence[int], *, same_shapes: bool) -> dict[str, Any]:
    """The verdict on what ranks say; those that have not come yet are None.

    Besides `refused` and `warned`, it tells the most bytes that any of them holds, and for each the first that is
    like it, which plans for it.
    """
    first = said[0]
    assert first is not None, "the first rank judges"
    refused = warned = ""
    for name in Facts.__dataclass_fields__:
        other = [place for place, item in enumerate(said) if item is not None and item["facts"] != first["facts"]]
        apart = [place for place in other if said[place]["facts"][name] != first["facts"][name]]  # type: ignore[index]
        if apart:
            sentence = _difference(name, apart, said, members)
            may_differ = name == "shapes" and not same_shapes
            refused, warned = ("", sentence) if may_differ else (sentence, "")
            break
    held = [int(item["resident_bytes"]) for item in said if item is not None]
    return {"refused": refused, "warned": warned, "most_bytes": max(held), "like": list(_like(said))}


def _like(said: Sequence[dict[str, Any] | None]) -> Iterator[int]:
    seen: dict[str, int] = {}
    for place, item in enumerate(said):
        yield seen.setdefault(repr(item and item["facts"]), place)


def _difference(name: str, apart: list[int], said: Sequence[Any], members: Sequence[int]) -> str:
    theirs, ours = _around(said[apart[0]]["facts"][name], said[0]["facts"][name])
    ranks = [members[place] for place in apart]
    does = "differs" if len(ranks) == 1 else "differ"
    first = f"rank {members[0]}"
    return f"{named(ranks)} {does} from {first} in {_WORDS[name]}: {theirs} there, {ours} on {first}"


def _around(theirs: str, ours: str) -> tuple[str, str]:
    """Both from shortly before the place where they differ: of a long list, that is what matters."""
    at = next((place for place, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
    start = max(0, theirs.rfind(", ", 0, at) + 2 if ", " in theirs[:at] else 0)
    return _short(theirs[start:]), _short(ours[start:])


def _short(text: str) -> str:
    return (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…") or "none"


def as_said(facts: Facts, resident_bytes: int) -> dict[str, Any]:
    return {"facts": asdict(facts), "resident_bytes": resident_bytes}


def nothing_to_plan(reason: str) -> dict[str, Any]:
    """What a rank says that came to the end of its first call without a graph."""
    return {"facts": dict.fromkeys(Facts.__dataclass_fields__, f"nothing to plan ({reason})"), "resident_bytes": 0}
