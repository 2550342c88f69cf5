"""Images: open sources as catalogs, decode and transform them, and load them in batches."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.data.benchmarks import BENCHMARKS, Benchmark
    from shortlist.data.catalog import ROLES, SPLITS, Catalog, Judgement, Judgements
    from shortlist.data.folders import UNLABELLED
    from shortlist.data.images import ImageDataset, ImageError, load_image
    from shortlist.data.inspection import CheckReport, check, find_unreadable, summary
    from shortlist.data.loader import image_chunks
    from shortlist.data.sources import open_catalog, open_collection
    from shortlist.data.splits import half_validation, open_set_split
    from shortlist.data.transforms import FitTransform, TestTransform, TrainTransform, Transform
    from shortlist.data.unpickling import read_plain_pickle

__all__ = [
    "BENCHMARKS",
    "ROLES",
    "SPLITS",
    "UNLABELLED",
    "Benchmark",
    "Catalog",
    "CheckReport",
    "FitTransform",
    "ImageDataset",
    "ImageError",
    "Judgement",
    "Judgements",
    "TestTransform",
    "TrainTransform",
    "Transform",
    "check",
    "find_unreadable",
    "half_validation",
    "image_chunks",
    "load_image",
    "open_catalog",
    "open_collection",
    "open_set_split",
    "read_plain_pickle",
    "summary",
]
