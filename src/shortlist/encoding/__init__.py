"""Encoding images as vectors: in memory, in a resumable .npy file, or in a Parquet table."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.encoding.embed import NonFiniteError, embed_images, embed_to_file
    from shortlist.encoding.encoder import Encoder, ImageLike
    from shortlist.encoding.feature_cache import CachedFeatures, FeatureCache, Views
    from shortlist.encoding.shards import EmbeddedShard, IncompletePartsError, Parts, Shard, embed_shard
    from shortlist.encoding.vector_file import left_out_images

__all__ = [
    "CachedFeatures",
    "EmbeddedShard",
    "Encoder",
    "FeatureCache",
    "ImageLike",
    "IncompletePartsError",
    "NonFiniteError",
    "Parts",
    "Shard",
    "Views",
    "embed_images",
    "embed_shard",
    "embed_to_file",
    "left_out_images",
]
