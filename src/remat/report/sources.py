"""The files a report can be made from: plans, profiles and curves, told apart by what they say they are."""

from __future__ import annotations

from pathlib import Path

from remat.core.codec import FORMAT as PLAN_FORMAT
from remat.core.codec import VERSION as PLAN_VERSION
from remat.core.codec import load_plan
from remat.core.document import read_document
from remat.core.pareto_file import FORMAT as PARETO_FORMAT
from remat.core.pareto_file import VERSION as PARETO_VERSION
from remat.core.pareto_file import load_pareto
from remat.core.profile_codec import FORMAT as PROFILE_FORMAT
from remat.core.profile_codec import VERSION as PROFILE_VERSION
from remat.core.profile_codec import load_profile
from remat.report.contents import Source

_VERSIONS = {PLAN_FORMAT: PLAN_VERSION, PROFILE_FORMAT: PROFILE_VERSION, PARETO_FORMAT: PARETO_VERSION}


def load_source(path: Path) -> Source:
    """The plan, profile or curve in `path`; anything else is a `FileFormatError`."""
    kind = read_document(path, _VERSIONS).text("format")
    if kind == PLAN_FORMAT:
        return load_plan(path)
    return load_profile(path) if kind == PROFILE_FORMAT else load_pareto(path)
