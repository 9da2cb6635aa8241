"""Prometheus metrics of the server, under ``nucleate_`` names; those that gateways look up also under vLLM's names.

Request metrics are counted as they happen. Engine metrics are read from ``EngineStats`` at every scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from nucleate.outputs import EngineStats, FinishReason, SpeculativeStats
from nucleate.server.http_errors import ErrorKind
from nucleate.server.openai.response_format import FORMAT_FIELDS
from nucleate.structured_output.spec import KINDS

_CHAT_APIS = ("/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
GENERATION_ROUTES = ("/v1/completions", "/v1/chat/completions", *_CHAT_APIS)
OTHER = "other"
"""The route label of unknown paths: clients must not be able to create label values."""

# fmt: off
BUCKETS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0,
)
# fmt: on
"""Upper bounds of the histogram buckets, in seconds."""
_SHARED_NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
)
VLLM_ALIASES = frozenset(f"nucleate_{name}" for name in _SHARED_NAMES)
"""Metrics that are also exported with the prefix ``vllm:``."""


class TokenHistogram:
    """A histogram of seconds that is observed at every token, without the locks of ``prometheus_client``'s."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text, self._counts, self._sum = name, text, [0] * (len(BUCKETS) + 1), 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the metric, as ``prometheus_client`` expects of a collector."""
        ends = [*map(str, BUCKETS), "+Inf"]
        buckets = [*zip(ends, accumulate(map(float, self._counts)), strict=True)]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """The metrics of one server. Not thread-safe: call it from the event loop.

    model: the value of the label ``model_name``. stats: returns the current statistics of the engine.
    """

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._model = model.encode(errors="backslashreplace").decode()  # command lines may hold invalid UTF-8
        self._stats = stats
        own = self._request_metrics = CollectorRegistry()

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"nucleate_{name}", text, labels, registry=own)

        def time(name: str, text: str, *labels: str) -> Histogram:
            text = f"{text}, in seconds."
            return Histogram(f"nucleate_{name}_seconds", text, labels, buckets=BUCKETS, registry=own)

        def token_time(name: str, text: str) -> TokenHistogram:
            return TokenHistogram(f"nucleate_{name}_seconds", f"{text}, in seconds.", own)

        self._requests = count("http_requests", "HTTP requests, by route and status.", "route", "status")
        self._durations = time("http_request_duration", "Duration of successful HTTP requests, by route", "route")
        self._latencies = time("e2e_request_latency", "Duration of successful generation requests")
        self._errors = count("request_errors", "Requests that failed in the server, by kind of error.", "kind")
        self._disconnects = count("client_disconnects", "Clients that disconnected before the end of a response.")
        text = "Finished sequences, by finish reason (a request may have several)."
        self._finished = count("finished_sequences", text, "finish_reason")
        text = "Same as nucleate_finished_sequences_total, without errors."
        self._succeeded = Counter("vllm:request_success", text, ("finished_reason",), registry=own)
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of all requests.")
        text = "Requests with structured output, by kind."
        self.structured_outputs = count("structured_output_requests", text, "kind")
        text = "Requests rejected because of an invalid structured-output constraint."
        self._structured_errors = count("structured_output_errors", text)
        self.time_to_first_token = token_time("time_to_first_token", "Time to the first token of a request")
        self.inter_token_latency = token_time("inter_token_latency", "Time between tokens of a sequence")
        self._create_labels()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def _create_labels(self) -> None:
        """Export all label values from the start, at 0."""
        for kind in get_args(ErrorKind):
            self._errors.labels(kind)
        for kind in KINDS:
            self.structured_outputs.labels(kind)
        for reason in get_args(FinishReason):
            self._finished.labels(reason)
            if reason != "error":
                self._succeeded.labels(reason)

    def count_request(
        self, route: str, status: int, seconds: float, *, error: ErrorKind | None = None, disconnected: bool = False
    ) -> None:
        """Count a finished request.

        route: the path of the matched route, which no client can choose; empty if there is none. status: the HTTP
        status; a stream with status 200 may still have failed or been disconnected. Durations are observed for
        successful requests only, because errors are fast.
        """
        name = route or OTHER
        self._requests.labels(name, str(status)).inc()
        if error is None and status >= 500:
            error = "internal"
        if error is not None:
            self._errors.labels(error).inc()
        if disconnected:
            self._disconnects.inc()
        if error is None and not disconnected and status < 400:
            self._durations.labels(name).observe(seconds)
            if name in GENERATION_ROUTES:
                self._latencies.observe(seconds)

    def count_finished_sequence(self, reason: FinishReason) -> None:
        self._finished.labels(reason).inc()
        if reason != "error":
            self._succeeded.labels(reason).inc()

    def count_rejected(self, field: str) -> None:
        """Count a rejected request if the field at fault sets a structured-output constraint."""
        if field in FORMAT_FIELDS:
            self._structured_errors.inc()

    def render(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and its content type.

        Not in the OpenMetrics format: ``prometheus_client`` would write the colons of vLLM's names as underscores.
        """
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, as ``prometheus_client`` expects of a collector."""
        stats = self._stats()
        for family in (*self._request_metrics.collect(), *_engine(stats), *_speculation(stats.speculative)):
            family.samples = [
                sample._replace(labels={"model_name": self._model, **sample.labels})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family
            if family.name in VLLM_ALIASES:
                yield _alias(family)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"nucleate_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"nucleate_{name}", text, value)


def _engine(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Running sequences (each choice of a request counts).", stats.num_running_seqs)
    yield _gauge("num_requests_waiting", "Queued sequences (each choice of a request counts).", stats.num_waiting_seqs)
    yield _gauge("kv_cache_blocks", "Blocks of the KV cache.", stats.num_kv_blocks)
    yield _gauge("kv_cache_blocks_used", "Blocks of the KV cache in use.", stats.num_used_kv_blocks)
    yield _gauge("kv_cache_usage_perc", "Fraction of the KV cache in use, 0 to 1.", stats.kv_cache_usage)
    yield _gauge("batch_invariant", "1 if a seed gives the same text in every batch.", float(stats.batch_invariant))
    yield _counter("forward_tokens", "Tokens processed in forward passes (prefill and decode).", stats.computed_tokens)
    queries = "Prompt tokens looked up in the prefix cache (of each choice that has finished)."
    yield _counter("prefix_cache_queries", queries, stats.prefix_cache_queries)
    yield _counter("prefix_cache_hits", "Prompt tokens served from the prefix cache.", stats.prefix_cache_hits)
    yield _counter("generation_tokens", "Generated tokens.", stats.generation_tokens)
    yield _counter("sampled_tokens", "Generated tokens that were sampled.", stats.sampled_tokens)
    forced = "Generated tokens that a grammar determined (jump-forward decoding)."
    yield _counter("jump_forward_tokens", forced, stats.jump_forward_tokens)
    yield _counter("num_preemptions", "Preempted sequences.", stats.num_preemptions)
    yield _counter("forward_passes", "Forward passes of the model.", stats.num_steps)
    yield _counter("forward_pass_seconds", "Time in forward passes, in seconds.", stats.forward_seconds)
    yield _counter("sampling_seconds", "Time in the sampler, in seconds.", stats.sampling_seconds)
    yield _counter("grammar_mask_seconds", "Time for structured-output masks, in seconds.", stats.grammar_mask_seconds)


def _speculation(stats: SpeculativeStats) -> Iterator[Metric]:
    text = "Verification steps of speculative decoding, per sequence."
    yield _counter("spec_decode_num_steps", text, stats.num_verification_steps)
    yield _counter("spec_decode_num_draft_tokens", "Proposed draft tokens.", stats.draft_tokens)
    yield _counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.accepted_tokens)
    name = "nucleate_spec_decode_num_accepted_tokens_per_pos"
    accepted = CounterMetricFamily(name, "Accepted draft tokens, by position in the draft.", labels=["position"])
    for position, count in enumerate(stats.accepted_tokens_per_position):
        accepted.add_metric([str(position)], count)
    yield accepted
    length = "Mean tokens per verification step since the server started; 1 without speculative decoding."
    yield _gauge("spec_decode_mean_acceptance_length", length, stats.mean_acceptance_length)
    yield _counter("spec_decode_draft_seconds", "Time to propose draft tokens, in seconds.", stats.draft_seconds)


def _alias(family: Metric) -> Metric:
    """Return a metric under vLLM's name."""
    name = family.name.replace("nucleate_", "vllm:", 1)
    made = Metric(name, f"Same as {family.name}.", family.type)
    made.samples = [each._replace(name=each.name.replace(family.name, name, 1)) for each in family.samples]
    return made
