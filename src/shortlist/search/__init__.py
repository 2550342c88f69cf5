"""Nearest neighbours: exact search with torch, and approximate search with FAISS."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.search.exact import nearest
    from shortlist.search.vectors import Vectors, open_vectors

__all__ = ["Vectors", "nearest", "open_vectors"]
