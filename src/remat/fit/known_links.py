"""The catalogue of links between ranks: how fast each is, and which devices usually have it.

In: `links.json` of this package and, after it, the files a user names, which add links or replace them by name. Out:
`KnownLink`s by name. Figures are of one direction between one rank and the next.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from remat.core.document import Record, read_document
from remat.errors import FileFormatError, UnknownName

FORMAT, VERSION = "remat-links", 1
FILES_VARIABLE = "REMAT_LINKS"
"""Files to read after the catalogue, separated as those of PATH are."""


@dataclass(frozen=True, slots=True)
class KnownLink:
    name: str
    bytes_per_s: float
    latency_s: float
    devices: tuple[str, ...] = ()
    """Whose link it is within one machine, unless another is named."""


def known_links(files: Iterable[str | Path] = ()) -> dict[str, KnownLink]:
    """The catalogue, then the files of `$REMAT_LINKS`, then `files`."""
    chosen = [Path(name) for name in os.environ.get(FILES_VARIABLE, "").split(os.pathsep) if name]
    found: dict[str, KnownLink] = {}
    for path in (Path(__file__).with_name("links.json"), *chosen, *map(Path, files)):
        found.update((link.name, link) for link in read_links(path))
    return found


def find_link(name: str, links: Mapping[str, KnownLink] | None = None) -> KnownLink:
    """The link called `name`, whatever the case of its letters."""
    links = known_links() if links is None else links
    for known, link in links.items():
        if known.lower() == name.lower():
            return link
    raise UnknownName(f"No link is called {name!r}; known are {', '.join(links)}. Describe others in a file (--links).")


def usual_link(device: str, links: Mapping[str, KnownLink] | None = None) -> KnownLink:
    """What devices of one machine usually have between them; PCIe for those that nothing is known of."""
    links = known_links() if links is None else links
    return next((link for link in links.values() if device in link.devices), find_link("PCIe4", links))


def read_links(path: Path) -> tuple[KnownLink, ...]:
    record = read_document(path, {FORMAT: VERSION})
    return tuple(_decode(item) for item in record.records("links"))


def _decode(record: Record) -> KnownLink:
    rate = record.number("gigabytes_per_second")
    if rate <= 0:
        raise FileFormatError(f"{record.where}: `gigabytes_per_second` must be above 0, found {rate:g}; correct it.")
    devices = record.texts("devices") if "devices" in record.fields else ()
    return KnownLink(record.text("name"), rate * 1e9, record.number("microseconds") * 1e-6, tuple(devices))
