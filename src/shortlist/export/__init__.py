"""From a run to files that others load without shortlist."""

from shortlist.export.stage import Exported, export

__all__ = ["Exported", "export"]
