"""From an embedder to answers."""

from shortlist.extras import extra

with extra("search", __name__):
    from shortlist.retrieval.describer import Describer, Picture
    from shortlist.retrieval.embed import NotFinite, embed_images, embed_to_file
    from shortlist.retrieval.estimates import Estimate
    from shortlist.retrieval.evaluate import Evaluation, evaluate
    from shortlist.retrieval.gallery import Added, Gallery, GalleryError, Hit, Item, NoSuchItem, index
    from shortlist.retrieval.judged import JudgedScores, judged_scores
    from shortlist.retrieval.search import nearest
    from shortlist.retrieval.vector_file import left_out
    from shortlist.retrieval.vectors import Vectors, open_vectors

__all__ = [
    "Added",
    "Describer",
    "Estimate",
    "Evaluation",
    "Gallery",
    "GalleryError",
    "Hit",
    "Item",
    "JudgedScores",
    "NoSuchItem",
    "NotFinite",
    "Picture",
    "Vectors",
    "embed_images",
    "embed_to_file",
    "evaluate",
    "index",
    "judged_scores",
    "left_out",
    "nearest",
    "open_vectors",
]
