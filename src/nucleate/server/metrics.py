"""What Prometheus reads of a server: counted while requests run, written when asked for. Knows no HTTP and no engine.

Counting costs an addition or two; sums, names and text are made at the time of a scrape, also those under vLLM's names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from nucleate.core.event import FinishReason
from nucleate.core.structured import FORMS
from nucleate.engine.stats import Drafts, Stats
from nucleate.server.wire.forms import NAMES

ErrorKind = Literal["internal", "model", "engine", "timeout", "queue_full", "shutdown"]
"""Why a request failed that was not itself at fault. internal: nobody expected it. model: an answer's logits were not
numbers, or its forward failed. engine: it runs no longer. timeout: it took longer than a request may. queue_full: too
many waited already. shutdown: the server stops."""

GENERATING = ("/v1/completions", "/v1/chat/completions")
ROUTES = (
    *GENERATING,
    "/v1/models",
    "/v1/models/{model:path}",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/health",
    "/version",
    "/metrics",
    "/openapi.json",
)
OTHER = "other"
"""The route of what is none: clients must not be able to make up label values."""

# fmt: off
BUCKETS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0,
)
# fmt: on
"""Seconds: the upper ends, each of them included."""


class Histogram:
    """How often something took how long."""

    __slots__ = ("counts", "total")

    def __init__(self, parts: Iterable[Histogram] = ()) -> None:
        """parts: histograms to begin with the sum of."""
        self.counts = [0] * (len(BUCKETS) + 1)  # by bucket; not yet summed up
        self.total = 0.0  # seconds
        for part in parts:
            self.counts = [own + its for own, its in zip(self.counts, part.counts, strict=True)]
            self.total += part.total

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each holds those before it, and the last one all."""
        below, told = 0, []
        for end, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            below += count
            told.append((end, float(below)))
        return told


class Metrics:
    """The figures of one server. Used from its event loop only; several in a process know nothing of each other.

    model: the name that requests call it by. stats: the engine in figures. routes: the paths that are told apart.
    """

    def __init__(self, model: str, stats: Callable[[], Stats], routes: Iterable[str] = ROUTES) -> None:
        self._model = model.encode(errors="backslashreplace").decode()  # a name of the command line may be no UTF-8
        self._stats, self._routes = stats, frozenset(routes)
        self._requests: Counter[tuple[str, str]] = Counter()  # by route and status
        self._durations: dict[str, Histogram] = {}  # by route
        self._first, self._between = Histogram(), Histogram()
        self._finished: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._errors: dict[str, int] = dict.fromkeys(get_args(ErrorKind), 0)
        self._forms: dict[str, int] = dict.fromkeys(FORMS, 0)
        self._prompt_tokens = self._disconnects = self._refused_forms = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def request(
        self, route: str, status: int, seconds: float, *, error: ErrorKind | None = None, disconnected: bool = False
    ) -> None:
        """A request is over. status: of its answer, though a stream may have ended with an error, or its client left.

        How long it took is told apart by route, of those only that were answered to their end: a refusal is quick.
        """
        name = route if route in self._routes else OTHER
        self._requests[name, str(status)] += 1
        if error is None and status >= 500:
            error = "internal"
        if error is not None:
            self._errors[error] += 1
        self._disconnects += disconnected
        if error is None and not disconnected and status < 400:
            if name not in self._durations:
                self._durations[name] = Histogram()
            self._durations[name].observe(seconds)

    def prompt(self, tokens: int) -> None:
        """A prompt goes to the engine."""
        self._prompt_tokens += tokens

    def first_token(self, seconds: float) -> None:
        """The first token of a request has come. seconds: since the request came."""
        self._first.observe(seconds)

    def token(self, seconds: float) -> None:
        """Another token of an answer has come. seconds: since the one before it."""
        self._between.observe(seconds)

    def finish(self, reason: FinishReason) -> None:
        """An answer has ended."""
        self._finished[reason] += 1

    def form(self, kind: str) -> None:
        """A request whose answers have a form goes to the engine. kind: one of FORMS."""
        self._forms[kind] += 1

    def refused_form(self, field: str) -> None:
        """A request was refused for a field of its body: counted if that says a form."""
        self._refused_forms += field in NAMES

    def render(self) -> tuple[bytes, str]:
        """All figures as Prometheus' text, and its content type.

        Never as OpenMetrics: the library then writes the colons of vLLM's names as underscores.
        """
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """What ``prometheus_client`` asks a collector for."""
        stats = self._stats()
        yield from self._of_requests()
        yield from self._of_answers()
        yield from self._of_engine(stats)
        yield from self._of_drafts(stats.drafts)
        yield from self._as_vllm(stats)

    def _of_requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "nucleate_requests", "Requests that are over, by route and status", labels=["model_name", "route", "status"]
        )
        for (route, status), count in sorted(self._requests.items()):
            requests.add_metric([self._model, route, status], count)
        yield requests
        durations = HistogramMetricFamily(
            "nucleate_request_duration_seconds",
            "From a request to the end of its answer, of those answered to their end",
            labels=["model_name", "route"],
        )
        for route, histogram in sorted(self._durations.items()):
            durations.add_metric([self._model, route], histogram.buckets(), histogram.total)
        yield durations
        errors = "Requests that ended with status 5xx, or with an error in mid-stream"
        yield self._counters("nucleate_errors", errors, "kind", self._errors)
        yield self._counter("nucleate_disconnects", "Clients that left before their answer ended", self._disconnects)

    def _of_answers(self) -> Iterator[Metric]:
        finished = "Answers that have ended (a request may ask for many)"
        yield self._counters("nucleate_answers_finished", finished, "finish_reason", self._finished)
        yield self._counter("nucleate_prompt_tokens", "Tokens of prompts", self._prompt_tokens)
        yield self._counters("nucleate_forms", "Requests for answers of some form, by kind", "form", self._forms)
        yield self._counter("nucleate_forms_refused", "Requests refused for their form", self._refused_forms)
        first, between = "From a request to its first token", "Between two tokens of an answer"
        yield self._histogram("nucleate_time_to_first_token_seconds", first, self._first)
        yield self._histogram("nucleate_inter_token_latency_seconds", between, self._between)

    def _of_engine(self, stats: Stats) -> Iterator[Metric]:
        yield self._gauge("nucleate_answers_running", "Answers at work", stats.running)
        yield self._gauge("nucleate_answers_waiting", "Answers that wait for their turn", stats.waiting)
        yield self._gauge("nucleate_kv_blocks", "Blocks of keys and values", stats.blocks)
        yield self._gauge("nucleate_kv_blocks_used", "Blocks of keys and values in use", stats.blocks_used)
        yield self._gauge("nucleate_kv_cache_usage", "Share of the blocks in use, 0 to 1", _share(stats))
        reused = "Tokens that did not have to be read, as others begin with the same"
        yield self._counter("nucleate_tokens_read", "Tokens that the model read: prompts and answers", stats.read)
        yield self._counter("nucleate_tokens_reused", reused, stats.reused)
        forced = "Tokens of answers that were not drawn, as nothing else could follow"
        yield self._counter("nucleate_tokens_drawn", "Tokens of answers that were drawn", stats.drawn)
        yield self._counter("nucleate_tokens_forced", forced, stats.forced)
        yield self._counter("nucleate_preemptions", "Answers that had to give way to others", stats.preempted)
        yield self._counter("nucleate_forwards", "Forwards of the model", stats.steps)
        yield self._counter("nucleate_forward_seconds", "Seconds in the model", stats.forward_seconds)
        yield self._counter("nucleate_sampler_seconds", "Seconds in the sampler", stats.sampler_seconds)
        yield self._counter("nucleate_mask_seconds", "Seconds for what forms allow", stats.mask_seconds)

    def _of_drafts(self, drafts: Drafts) -> Iterator[Metric]:
        rounds = "Forwards that gave an answer tokens, counted for each such answer, if tokens are drafted"
        yield self._counter("nucleate_draft_rounds", rounds, drafts.rounds)
        yield self._counter("nucleate_draft_tokens", "Drafted tokens that were read", drafts.drafted)
        yield self._counter("nucleate_draft_tokens_accepted", "Drafted tokens that were right", drafts.accepted)
        kept = {str(place): count for place, count in enumerate(drafts.kept)}
        accepted = "Drafted tokens that were right, by their place in the draft"
        yield self._counters("nucleate_draft_tokens_accepted_by_place", accepted, "place", kept)
        tau = "Tokens that a forward gives an answer, since the server began; 1 without drafts"
        yield self._gauge("nucleate_draft_tau", tau, drafts.tau)
        yield self._counter("nucleate_draft_seconds", "Seconds for drafts", drafts.seconds)
        made = "As nucleate_draft_tokens_total"
        yield self._counter("vllm:spec_decode_num_draft_tokens", made, drafts.drafted)
        right = "As nucleate_draft_tokens_accepted_total"
        yield self._counter("vllm:spec_decode_num_accepted_tokens", right, drafts.accepted)
        by_place = "As nucleate_draft_tokens_accepted_by_place_total"
        yield self._counters("vllm:spec_decode_num_accepted_tokens_per_pos", by_place, "position", kept)

    def _as_vllm(self, stats: Stats) -> Iterator[Metric]:
        """The same under the names that gateways look for."""
        yield self._gauge("vllm:num_requests_running", "As nucleate_answers_running", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "As nucleate_answers_waiting", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "As nucleate_kv_cache_usage: 1 is all of it", _share(stats))
        yield self._counter("vllm:prompt_tokens", "As nucleate_prompt_tokens_total", self._prompt_tokens)
        generated = "As nucleate_tokens_drawn_total and nucleate_tokens_forced_total"
        yield self._counter("vllm:generation_tokens", generated, stats.drawn + stats.forced)
        yield self._histogram(
            "vllm:time_to_first_token_seconds", "As nucleate_time_to_first_token_seconds", self._first
        )
        yield self._histogram(
            "vllm:inter_token_latency_seconds", "As nucleate_inter_token_latency_seconds", self._between
        )
        whole = Histogram(self._durations[route] for route in GENERATING if route in self._durations)
        yield self._histogram(
            "vllm:e2e_request_latency_seconds", "As nucleate_request_duration_seconds, where text is generated", whole
        )
        finished = {reason: count for reason, count in self._finished.items() if reason != "error"}
        success = "As nucleate_answers_finished_total, without errors"
        yield self._counters("vllm:request_success", success, "finished_reason", finished)

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        return _one(GaugeMetricFamily(name, what, labels=["model_name"]), [self._model], value)

    def _counter(self, name: str, what: str, value: float) -> Metric:
        return _one(CounterMetricFamily(name, what, labels=["model_name"]), [self._model], value)

    def _counters(self, name: str, what: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, what, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family

    def _histogram(self, name: str, what: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model], histogram.buckets(), histogram.total)
        return family


def _one(family: GaugeMetricFamily | CounterMetricFamily, labels: Sequence[str], value: float) -> Metric:
    family.add_metric(labels, value)
    return family


def _share(stats: Stats) -> float:
    return stats.blocks_used / stats.blocks if stats.blocks else 0.0
