"""Print the licences of the packages that shortlist depends on, as a table: python docs/licences.py > docs/licences.md.

The table lists direct dependencies and, marked as such, their dependencies, as installed in this environment with the
extra `all`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

INTRODUCTION = """# Licences of dependencies

shortlist is licensed under Apache-2.0. This page lists the licences that its dependencies declare.
`pip install shortlist` installs only the packages with the extra *none* and their dependencies; all other packages
belong to an extra. `python docs/licences.py` generates this page.

| package | extra | licence |
|---|---|---|"""


def requirements(package: Distribution, extras: frozenset[str]) -> Iterator[tuple[str, Requirement]]:
    """Yield the packages that a package needs here with these extras, and the extra that needs each."""
    for text in package.requires or []:
        needed = Requirement(text)
        for extra in ("", *sorted(extras)):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                yield extra, needed
                break


def declared_licence(package: Distribution) -> str:
    """Return the licence that a package declares: as an SPDX expression, as classifiers, or as text."""
    facts = package.metadata
    classifiers = [each.rpartition(" :: ")[2] for each in facts.get_all("Classifier") or [] if each.startswith("Lic")]
    text = (facts.get("License") or "").strip().partition("\n")[0].replace("UNKNOWN", "")
    found = facts.get("License-Expression") or ", ".join(classifiers) or text or "not declared"
    return str(found).replace("|", "/")


def dependencies() -> dict[str, tuple[str, str]]:
    """Return the extra and the licence of each package, by name."""
    found: dict[str, tuple[str, str]] = {}
    own = distribution("shortlist")
    extras = frozenset(own.metadata.get_all("Provides-Extra") or []) - {"all", "dev"}
    waiting = [(extra or "none", needed) for extra, needed in requirements(own, extras)]
    while waiting:
        extra, needed = waiting.pop(0)
        name = re.sub(r"[-_.]+", "-", needed.name).lower()
        if name in found or name == "shortlist":
            continue
        try:
            package = distribution(needed.name)
        except PackageNotFoundError:
            continue  # for another platform or version of Python
        found[name] = extra, declared_licence(package)
        waiting += [(f"through {name}", each) for _, each in requirements(package, frozenset(needed.extras))]
    return dict(sorted(found.items()))


if __name__ == "__main__":
    print(INTRODUCTION)
    for package_name, (needed_by, licence) in dependencies().items():
        print(f"| {package_name} | {needed_by} | {licence} |")
