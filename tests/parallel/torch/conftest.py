"""What tests of PyTorch's models share."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is in the extra 'torch'")
