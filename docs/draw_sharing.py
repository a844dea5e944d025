"""Draw the examples of explanation/addresses.md: how two small steps share memory, by free tags and exactly.

    python docs/draw_sharing.py

Writes images/sharing-exp.svg and images/sharing-mlp.svg beside this file; the same sources give the same files.
"""

from __future__ import annotations

from pathlib import Path

from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.layout.examples import exp_of_sum, two_layer_mlp
from remat.layout.liveness import version_id
from remat.layout.sharing import share_by_tags
from remat.layout.sharing_exact import share_exactly
from remat.layout.storages import Storages, storages_of
from remat.report.pictures.sharing import draw_sharing

IMAGES = Path(__file__).parent / "images"
PICTURES = {
    "sharing-exp.svg": ("exp(a·b + 3), 64 bytes each", exp_of_sum()),
    "sharing-mlp.svg": ("A training step of a two-layer MLP", two_layer_mlp()),
}


def draw(title: str, problem: Problem) -> str:
    schedule = plain_schedule(problem.graph)
    storages = storages_of(problem, schedule)
    apart = Storages(storages.buffers, ())
    panels = [
        ("free tags", share_by_tags(problem, schedule, in_place=False)),
        ("exact", share_exactly(apart)),
        ("in place, free tags", share_by_tags(problem, schedule)),
        ("in place, exact", share_exactly(storages)),
    ]
    names = {version_id(step, step): op.name for step, op in enumerate(problem.graph.ops)}
    return draw_sharing(title, panels, names)


if __name__ == "__main__":
    for name, (title, problem) in PICTURES.items():
        (IMAGES / name).write_text(draw(title, problem), encoding="utf-8")
