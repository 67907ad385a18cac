"""An import-linter contract that reads as a table: each package, and what it may import.

import-linter's own contracts say who may *not* import whom, and refuse names that do not exist yet. This
one says what is allowed, so that anything new is refused until somebody writes it into the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import grimp
from importlinter import Contract, ContractCheck, fields, output

ROOT = "thinwire"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one package may import."""

    at_runtime: frozenset[str]
    for_types: frozenset[str]
    """Under `if TYPE_CHECKING`: whatever is allowed at run time, and the names marked `:types`."""


@dataclass(frozen=True, kw_only=True, order=True)
class Violation:
    """One import the table does not allow."""

    importer: str
    line_number: int
    line: str
    reason: str


class TableContract(Contract):
    """Every import of our own and of the watched packages stands in the table."""

    table = fields.ListField(subfield=fields.StringField())
    watched = fields.ListField(subfield=fields.StringField())

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        """Compare every direct import with the table."""
        runtime_graph = grimp.build_graph(
            ROOT, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
        )
        rows = parse_table(cast(list[str], self.table))
        found = sorted(violations(graph, runtime_graph, rows, watched=cast(list[str], self.watched)))
        return ContractCheck(kept=not found, metadata={"violations": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each import that is not in the table, with its line."""
        for violation in check.metadata["violations"]:
            output.print_error(
                f"{violation.importer}:{violation.line_number}: {violation.reason}", bold=False
            )
            output.print(f"    {violation.line}")
        output.new_line()


def parse_table(lines: Iterable[str]) -> dict[str, Row]:
    """Read lines of the form `package | name name:types ...`."""
    rows = {}
    for line in lines:
        package, _, allowed = line.partition("|")
        names = allowed.split()
        rows[package.strip()] = Row(
            at_runtime=frozenset(name for name in names if not name.endswith(":types")),
            for_types=frozenset(name.removesuffix(":types") for name in names),
        )
    return rows


def violations(
    graph: grimp.ImportGraph,
    runtime_graph: grimp.ImportGraph,
    rows: Mapping[str, Row],
    *,
    watched: Collection[str],
) -> Iterator[Violation]:
    """List the imports in `graph` that `rows` does not allow; `runtime_graph` lacks those for types."""
    for importer in filter(is_ours, graph.modules):
        package = package_of(importer)
        for imported in graph.find_modules_directly_imported_by(importer):
            if package_of(imported) == package or not (is_ours(imported) or imported in watched):
                continue
            at_runtime = runtime_graph.direct_import_exists(importer=importer, imported=imported)
            if package not in rows:
                reason = f"{package} has no row in the table"
            elif covers(rows[package].at_runtime if at_runtime else rows[package].for_types, imported):
                continue
            elif covers(rows[package].for_types, imported):
                reason = f"{package} may import {short(imported)} only for type checking"
            else:
                reason = f"{package} may not import {short(imported)}"
            for detail in graph.get_import_details(importer=importer, imported=imported):
                line_number, line = detail["line_number"], detail["line_contents"]
                yield Violation(importer=importer, line_number=line_number, line=line, reason=reason)


def is_ours(module: str) -> bool:
    """Whether a module belongs to this project."""
    return module == ROOT or module.startswith(f"{ROOT}.")


def short(module: str) -> str:
    """Name a module as the table does: `thinwire.wire.base` is `wire.base`, `thinwire` is `__init__`."""
    return "__init__" if module == ROOT else module.removeprefix(f"{ROOT}.")


def package_of(module: str) -> str:
    """Name the row a module belongs to."""
    return short(module).split(".")[0]


def covers(names: Collection[str], imported: str) -> bool:
    """Whether a module is among the names, or below one of them; `*` is everything but `cli`."""
    if "*" in names and package_of(imported) != "cli":
        return True
    return any(f"{short(imported)}.".startswith(f"{name}.") for name in names)
