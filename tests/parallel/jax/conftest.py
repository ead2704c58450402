"""What tests of JAX's programs share."""

from __future__ import annotations

import pytest

pytest.importorskip("optax", reason="JAX and optax are in the extra 'jax'")
