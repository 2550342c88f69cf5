"""Image collections that are searched by image: in a folder with FAISS, or in Milvus."""

from shortlist.extras import extra

with extra("search", __name__):
    from shortlist.gallery.gallery import Added, Gallery, GalleryError, Hit, Item, NoSuchItem, index

__all__ = ["Added", "Gallery", "GalleryError", "Hit", "Item", "NoSuchItem", "index"]
