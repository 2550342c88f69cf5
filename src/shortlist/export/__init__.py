"""Export of a run's model to formats that can be used without shortlist."""

from shortlist.extras import extra

with extra("export", __name__):
    from shortlist.export.exporter import Exported, export
    from shortlist.export.push import HubError

__all__ = ["Exported", "HubError", "export"]
