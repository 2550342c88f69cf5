"""Benchmarks that can be opened by name; one file per benchmark reads its folder into a catalog."""

from collections.abc import Mapping
from types import MappingProxyType

from shortlist.data.benchmarks import (
    cars196,
    cub,
    gldv1,
    gldv2,
    glyphs,
    inaturalist,
    inshop,
    omniglot,
    revisited,
    sfm120k,
    sop,
    vehicleid,
)
from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        benchmark.name: benchmark
        for benchmark in (
            cars196.BENCHMARK,
            sop.BENCHMARK,
            inaturalist.BENCHMARK,
            *vehicleid.BENCHMARKS,
            cub.BENCHMARK,
            inshop.BENCHMARK,
            gldv1.BENCHMARK,
            gldv2.BENCHMARK,
            *revisited.BENCHMARKS,
            sfm120k.BENCHMARK,
            omniglot.BENCHMARK,
            glyphs.BENCHMARK,
        )
    }
)

__all__ = ["BENCHMARKS", "Benchmark", "ImageCount"]
