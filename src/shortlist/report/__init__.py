"""From answers to something to look at."""

from shortlist.extras import extra

with extra("report", __name__):
    from shortlist.report.comparing import compare_runs
    from shortlist.report.comparison_page import write_comparison
    from shortlist.report.run_report import write_report

__all__ = ["compare_runs", "write_comparison", "write_report"]
