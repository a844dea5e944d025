"""The files a report can be made from: plans, profiles and curves, told apart by what they say they are."""

from __future__ import annotations

from pathlib import Path

from remat.core.document import read_document
from remat.core.files.pareto_file import FORMAT as PARETO_FORMAT
from remat.core.files.pareto_file import VERSION as PARETO_VERSION
from remat.core.files.pareto_file import decode_pareto
from remat.core.files.plan_file import FORMAT as PLAN_FORMAT
from remat.core.files.plan_file import VERSION as PLAN_VERSION
from remat.core.files.plan_file import decode_plan
from remat.core.files.profile_file import FORMAT as PROFILE_FORMAT
from remat.core.files.profile_file import VERSION as PROFILE_VERSION
from remat.core.files.profile_file import decode_profile
from remat.report.contents.gathered import Source

_VERSIONS = {PLAN_FORMAT: PLAN_VERSION, PROFILE_FORMAT: PROFILE_VERSION, PARETO_FORMAT: PARETO_VERSION}


def load_source(path: Path) -> Source:
    """The plan, profile or curve in `path`; anything else is a `FileFormatError`."""
    record = read_document(path, _VERSIONS)
    kind = record.text("format")
    if kind == PLAN_FORMAT:
        return decode_plan(record, path)
    return decode_profile(record, path) if kind == PROFILE_FORMAT else decode_pareto(record, path)
