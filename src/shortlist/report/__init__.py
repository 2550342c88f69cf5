"""Reports and comparisons of runs: HTML pages, plots, contact sheets and tables."""

from shortlist.extras import extra

with extra("report", __name__):
    from shortlist.report.comparison import compare_runs, write_comparison
    from shortlist.report.group_comparison import compare_groups
    from shortlist.report.model_report import write_model_report
    from shortlist.report.run_report import write_report
    from shortlist.report.sweep_report import write_sweep_report

__all__ = [
    "compare_groups",
    "compare_runs",
    "write_comparison",
    "write_model_report",
    "write_report",
    "write_sweep_report",
]
