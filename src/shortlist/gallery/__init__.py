"""Image collections that are searched by image: in a folder, or in Milvus."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.gallery.gallery import Added, Gallery, GalleryError, Hit, Item, NoSuchItem, index
    from shortlist.gallery.rebuilding import rebuild
    from shortlist.gallery.switching import switch, switch_back

__all__ = ["Added", "Gallery", "GalleryError", "Hit", "Item", "NoSuchItem", "index", "rebuild", "switch", "switch_back"]
