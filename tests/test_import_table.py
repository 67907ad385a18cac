from __future__ import annotations

import pytest

pytest.importorskip("importlinter", reason="only `make check` needs it")

import grimp

from tools.import_table import parse_table, violations

TABLE = parse_table(
    [
        "errors     |",
        "wire       | errors torch",
        "strategies | wire.base errors torch:types",
        "engine     | strategies wire errors torch",
        "cli        | *",
    ]
)


def reasons(importer: str, imported: str, *, for_types: bool = False) -> list[str]:
    graph, runtime_graph = grimp.ImportGraph(), grimp.ImportGraph()
    graph.add_import(importer=importer, imported=imported, line_number=1, line_contents="import")
    if not for_types:
        runtime_graph.add_import(importer=importer, imported=imported)
    else:
        runtime_graph.add_module(importer)
        runtime_graph.add_module(imported)
    return [found.reason for found in violations(graph, runtime_graph, TABLE, watched=["torch"])]


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("thinwire.wire.base", "thinwire.errors"),
        ("thinwire.wire.process_group", "thinwire.wire.base"),
        ("thinwire.strategies.gossip", "thinwire.wire.base"),
        ("thinwire.engine.attach", "thinwire.wire.connect"),
        ("thinwire.engine.attach", "torch"),
        ("thinwire.errors", "numpy"),
        ("thinwire.cli.train", "thinwire.engine.attach"),
        ("thinwire.cli.train", "thinwire"),
    ],
)
def test_what_the_table_lists_may_be_imported(importer: str, imported: str) -> None:
    assert reasons(importer, imported) == []


@pytest.mark.parametrize(
    ("importer", "imported", "reason"),
    [
        ("thinwire.errors", "thinwire.wire", "errors may not import wire"),
        ("thinwire.errors", "torch", "errors may not import torch"),
        ("thinwire.strategies.gossip", "thinwire.wire", "strategies may not import wire"),
        ("thinwire.strategies.gossip", "thinwire.wire.base2", "strategies may not import wire.base2"),
        ("thinwire.engine.attach", "thinwire.cli", "engine may not import cli"),
        ("thinwire.engine.attach", "thinwire", "engine may not import __init__"),
        ("thinwire.novelty", "thinwire.errors", "novelty has no row in the table"),
        ("thinwire", "thinwire.errors", "__init__ has no row in the table"),
    ],
)
def test_everything_else_is_refused_with_a_reason(importer: str, imported: str, reason: str) -> None:
    assert reasons(importer, imported) == [reason]


def test_a_name_marked_types_may_be_imported_for_type_checking_only() -> None:
    assert reasons("thinwire.strategies.gossip", "torch", for_types=True) == []
    assert reasons("thinwire.strategies.gossip", "torch") == [
        "strategies may import torch only for type checking"
    ]
