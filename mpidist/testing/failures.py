"""Tracebacks as soon as tests fail: they would be lost if a later test hangs, or ends the job."""

from __future__ import annotations

from typing import Any

import pytest


class Failures:
    """Prints the failures of a run of several ranks at once; pytest's summary at the end leaves these out.

    Args:
        config: The run's configuration.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a failure. A debugger has shown it, or `--tb` wants none or a line."""
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        is_shown = hasattr(report, "_pdbshown")
        if reporter is None or not report.failed or is_shown or self._config.option.tbstyle in ("no", "line"):
            return
        where = "" if report.when == "call" else f" in {report.when}"
        # The letters of `-q` leave their line open.
        reporter.write_line("")
        reporter.write_sep("_", f"{report.nodeid}{where}", red=True, bold=True)
        reporter._outrep_summary(report)  # noqa: SLF001  # what the summary would print, by the run's options
        # As after --pdb, so that the summary prints no failure again.
        report._pdbshown = True  # type: ignore[attr-defined]  # noqa: SLF001  # pytest's own name
        reporter.flush()
