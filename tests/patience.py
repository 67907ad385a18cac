"""How long tests wait: a busy machine is no reason to fail, and pytest's own limit ends what hangs.

Imported by conftest.py and, for worker processes, by the server that they are forked from.
"""

from __future__ import annotations

import hypothesis

HANGS_S = 500.0
"""Whatever takes longer hangs."""

hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")
