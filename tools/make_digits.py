"""Writes digits.npz from scikit-learn's digits; run once, see src/thinwire/data/README.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def main() -> None:
    """Draw the split and write the file."""
    from sklearn.datasets import load_digits  # needed here only

    digits = load_digits()
    is_test = np.zeros(len(digits.target), dtype=bool)
    random = np.random.default_rng(0)
    for label in range(10):
        is_test[random.permutation(np.flatnonzero(digits.target == label))[:36]] = True
    np.savez_compressed(
        Path(__file__).parents[1] / "src/thinwire/data/digits.npz",
        images=digits.images.astype(np.uint8),
        labels=digits.target.astype(np.uint8),
        is_test=is_test,
    )


if __name__ == "__main__":
    main()
