"""Images to vectors: with an encoder, into memory, a resumable file or a Parquet table."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.encoding.embed import NotFinite, embed_images, embed_to_file
    from shortlist.encoding.encoder import Encoder, Picture
    from shortlist.encoding.vector_file import left_out

__all__ = ["Encoder", "NotFinite", "Picture", "embed_images", "embed_to_file", "left_out"]
