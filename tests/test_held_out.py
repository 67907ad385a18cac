"""`benchmarks.held_out`: what is held against what, and recipes that train."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.held_out import HeldOutRun, lost, overview, report
from benchmarks.held_out_recipes import ALPHABET, LENGTH, CharacterTransformer, Muon, orthogonal
from thinwire.engine.optimizer import is_normalised

EXACT = HeldOutRun(
    recipe="r", workers=4, strategy="all-reduce", seed=0, metric="accuracy", value=0.9, steps=10
)


def test_losses_are_against_exact_sgd_of_the_same_seed() -> None:
    other = replace(EXACT, seed=1, value=0.8)
    run = replace(EXACT, strategy="trickle", value=0.88)
    assert lost(run, [EXACT, other]) == pytest.approx(2.0)
    assert lost(replace(run, seed=1), [EXACT, other]) == pytest.approx(-8.0)
    assert lost(replace(run, workers=8), [EXACT]) is None
    worse = replace(run, metric="perplexity", value=9.9)
    assert lost(worse, [replace(EXACT, metric="perplexity", value=9.0)]) == pytest.approx(10.0)


def test_the_report_shows_what_lost_much_and_said_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent = replace(EXACT, strategy="trickle", value=0.88)
    report([EXACT, silent, replace(silent, strategy="sasgd", advice="may lose 2 points")])
    rows = capsys.readouterr().out.splitlines()
    assert "| trickle |" in rows[3]
    assert rows[3].endswith("+2.00 | +2.00 | NOTHING |")
    assert rows[4].endswith("| may lose 2 points |")


def test_the_overview_has_a_mean_over_seeds() -> None:
    other = replace(EXACT, seed=1, value=0.8)
    lossy = [replace(run, strategy="trickle", value=0.78) for run in (EXACT, other)]
    assert overview([EXACT, other, *lossy]).splitlines()[2] == "| `r`, 4 | 10 | 2 | 85.0 % | +7.0 (2) |"


def test_muon_makes_matrices_orthogonal_and_is_known_as_normalised() -> None:
    torch.manual_seed(0)
    for shape in ((8, 24), (24, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.3
    model = CharacterTransformer()
    optimizer = Muon(model.parameters(), lr=0.02)
    assert is_normalised(optimizer)
    tokens = torch.randint(ALPHABET, (4, LENGTH))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
