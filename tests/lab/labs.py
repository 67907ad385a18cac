"""Whether this machine lets us make labs."""

from __future__ import annotations

import pytest

from thinwire.errors import ThinwireError
from thinwire.lab.namespaces import enter_command


def _reason_not() -> str:
    try:
        enter_command()
    except ThinwireError as problem:
        return problem.message.splitlines()[0]
    return ""


_WHY_NOT = _reason_not()
needs_lab = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
