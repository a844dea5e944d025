"""What happened, for people: tables, pictures, pages and traces. In: plans, profiles, curves. Never imports torch."""

from __future__ import annotations

from remat.report.contents.gathered import Report, gather
from remat.report.write import FORMATS, write_report

__all__ = ["FORMATS", "Report", "gather", "write_report"]
