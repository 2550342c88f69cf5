"""From a run to files that others load without shortlist."""

from shortlist.extras import extra

with extra("export", __name__):
    from shortlist.export.stage import Exported, export

__all__ = ["Exported", "export"]
