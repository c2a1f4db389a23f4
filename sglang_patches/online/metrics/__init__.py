"""The worker's metrics in SGLang's own Prometheus endpoint (docs/metrics.md lists them).

SGLang serves what all its processes write into ``PROMETHEUS_MULTIPROC_DIR``, which it sets with
``--enable-metrics`` before it starts them (``sglang.srt.utils.set_prometheus_multiproc_dir``), so
metrics of ours need no route of their own. prometheus_client looks for that directory when it is
imported, so this package must not be imported earlier.
"""

from sglang_patches.online.metrics.writer import WorkerMetrics

__all__ = ["WorkerMetrics"]
