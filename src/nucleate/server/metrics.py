"""What Prometheus reads of a server: counted while requests run, written when asked for. Knows no HTTP and no engine.

The figures of the engine are asked for at the time of a scrape, which also tells some under vLLM's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily as _Total
from prometheus_client.core import GaugeMetricFamily as _Gauge
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from nucleate.engine.stats import EngineStats, SpeculativeStats
from nucleate.outputs import FinishReason
from nucleate.server.http_errors import ErrorKind
from nucleate.server.openai.response_format import FORMAT_FIELDS
from nucleate.structured_output.spec import KINDS

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
AS_VLLM: Mapping[str, str] = {
    "nucleate_answers_running": "vllm:num_requests_running",
    "nucleate_answers_waiting": "vllm:num_requests_waiting",
    "nucleate_kv_cache_usage": "vllm:kv_cache_usage_perc",
    "nucleate_prompt_tokens": "vllm:prompt_tokens",
    "nucleate_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "nucleate_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "nucleate_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "nucleate_draft_tokens_accepted": "vllm:spec_decode_num_accepted_tokens",
}
"""The names under which gateways look for some figures."""


class Metrics:
    """The figures of one server. Used from its event loop only; several in a process know nothing of each other.

    model: the name that requests call it by. stats: the engine in figures. routes: the paths that are told apart.
    """

    def __init__(self, model: str, stats: Callable[[], EngineStats], routes: Iterable[str] = ROUTES) -> None:
        self._model = model.encode(errors="backslashreplace").decode()  # a name of the command line may be no UTF-8
        self._stats, self._routes = stats, frozenset(routes)
        self._counted = counted = CollectorRegistry()
        requests = "Requests that are over, by route and status"
        self._requests = Counter("nucleate_requests", requests, ("route", "status"), registry=counted)
        duration = "From a request to the end of its answer, of those answered to their end"
        seconds = "nucleate_request_duration_seconds"
        self._durations = Histogram(seconds, duration, ("route",), buckets=BUCKETS, registry=counted)
        generated = f"As {seconds}, where text is generated"
        self._generated = Histogram("vllm:e2e_request_latency_seconds", generated, buckets=BUCKETS, registry=counted)
        errors = "Requests that ended with status 5xx, or with an error in mid-stream"
        self._errors = Counter("nucleate_errors", errors, ("kind",), registry=counted)
        left = "Clients that left before their answer ended"
        self._disconnects = Counter("nucleate_disconnects", left, registry=counted)
        finished = "Answers that have ended (a request may ask for many)"
        self._finished = Counter("nucleate_answers_finished", finished, ("finish_reason",), registry=counted)
        succeeded = "As nucleate_answers_finished_total, without errors"
        self._succeeded = Counter("vllm:request_success", succeeded, ("finished_reason",), registry=counted)
        self._prompt_tokens = Counter("nucleate_prompt_tokens", "Tokens of prompts", registry=counted)
        forms = "Requests for answers of some form, by kind"
        self._forms = Counter("nucleate_forms", forms, ("form",), registry=counted)
        refused = "Requests refused for their form"
        self._refused_forms = Counter("nucleate_forms_refused", refused, registry=counted)
        first, between = "From a request to its first token", "Between two tokens of an answer"
        self._first = Histogram("nucleate_time_to_first_token_seconds", first, buckets=BUCKETS, registry=counted)
        self._between = Histogram("nucleate_inter_token_latency_seconds", between, buckets=BUCKETS, registry=counted)
        self._begin()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def _begin(self) -> None:
        """All labels that there will be are there from the beginning."""
        for kind in get_args(ErrorKind):
            self._errors.labels(kind)
        for form in KINDS:
            self._forms.labels(form)
        for reason in get_args(FinishReason):
            self._finished.labels(reason)
            if reason != "error":
                self._succeeded.labels(reason)

    def request(
        self, route: str, status: int, seconds: float, *, error: ErrorKind | None = None, disconnected: bool = False
    ) -> None:
        """A request is over. status: of its answer, though a stream may have ended with an error, or its client left.

        How long it took is told apart by route, of those only that were answered to their end: a refusal is quick.
        """
        name = route if route in self._routes else OTHER
        self._requests.labels(name, str(status)).inc()
        if error is None and status >= 500:
            error = "internal"
        if error is not None:
            self._errors.labels(error).inc()
        if disconnected:
            self._disconnects.inc()
        if error is None and not disconnected and status < 400:
            self._durations.labels(name).observe(seconds)
            if name in GENERATING:
                self._generated.observe(seconds)

    def prompt(self, tokens: int) -> None:
        """A prompt goes to the engine."""
        self._prompt_tokens.inc(tokens)

    def first_token(self, seconds: float) -> None:
        """The first token of a request has come. seconds: since the request came."""
        self._first.observe(seconds)

    def token(self, seconds: float) -> None:
        """Another token of an answer has come. seconds: since the one before it."""
        self._between.observe(seconds)

    def finish(self, reason: FinishReason) -> None:
        """An answer has ended."""
        self._finished.labels(reason).inc()
        if reason != "error":
            self._succeeded.labels(reason).inc()

    def form(self, kind: str) -> None:
        """A request whose answers have a form goes to the engine. kind: one of KINDS."""
        self._forms.labels(kind).inc()

    def refused_form(self, field: str) -> None:
        """A request was refused for a field of its body: counted if that says a form."""
        if field in FORMAT_FIELDS:
            self._refused_forms.inc()

    def render(self) -> tuple[bytes, str]:
        """All figures as Prometheus' text, and its content type.

        Never as OpenMetrics: the library then writes the colons of vLLM's names as underscores.
        """
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """What ``prometheus_client`` asks a collector for."""
        stats = self._stats()
        for family in (*self._counted.collect(), *_of_engine(stats), *_of_drafts(stats.speculative)):
            family.samples = [
                sample._replace(labels={"model_name": self._model, **sample.labels})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family
            if family.name in AS_VLLM:
                yield _renamed(family, AS_VLLM[family.name])


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    share = stats.kv_cache_usage
    yield _Gauge("nucleate_answers_running", "Answers at work", stats.num_running_seqs)
    yield _Gauge("nucleate_answers_waiting", "Answers that wait for their turn", stats.num_waiting_seqs)
    yield _Gauge("nucleate_kv_blocks", "Blocks of keys and values", stats.num_kv_blocks)
    yield _Gauge("nucleate_kv_blocks_used", "Blocks of keys and values in use", stats.num_used_kv_blocks)
    yield _Gauge("nucleate_kv_cache_usage", "Share of the blocks in use, 0 to 1", share)
    reused = "Tokens that did not have to be read, as others begin with the same"
    yield _Total("nucleate_tokens_read", "Tokens that the model read: prompts and answers", stats.computed_tokens)
    yield _Total("nucleate_tokens_reused", reused, stats.prefix_cache_hit_tokens)
    forced = "Tokens of answers that were not drawn, as nothing else could follow"
    yield _Total("nucleate_tokens_drawn", "Tokens of answers that were drawn", stats.sampled_tokens)
    yield _Total("nucleate_tokens_forced", forced, stats.jump_forward_tokens)
    generated = "As nucleate_tokens_drawn_total and nucleate_tokens_forced_total"
    yield _Total("vllm:generation_tokens", generated, stats.generation_tokens)
    yield _Total("nucleate_preemptions", "Answers that had to give way to others", stats.num_preemptions)
    yield _Total("nucleate_forwards", "Forwards of the model", stats.num_steps)
    yield _Total("nucleate_forward_seconds", "Seconds in the model", stats.forward_seconds)
    yield _Total("nucleate_sampler_seconds", "Seconds in the sampler", stats.sampling_seconds)
    yield _Total("nucleate_mask_seconds", "Seconds for what forms allow", stats.grammar_mask_seconds)


def _of_drafts(drafts: SpeculativeStats) -> Iterator[Metric]:
    rounds = "Forwards that gave an answer tokens, counted for each such answer, if tokens are drafted"
    yield _Total("nucleate_draft_rounds", rounds, drafts.num_verification_steps)
    yield _Total("nucleate_draft_tokens", "Drafted tokens that were read", drafts.draft_tokens)
    yield _Total("nucleate_draft_tokens_accepted", "Drafted tokens that were right", drafts.accepted_tokens)
    for name, label in (
        ("nucleate_draft_tokens_accepted_by_place", "place"),
        ("vllm:spec_decode_num_accepted_tokens_per_pos", "position"),
    ):
        family = _Total(name, "Drafted tokens that were right, by their place in the draft", labels=[label])
        for place, count in enumerate(drafts.accepted_tokens_per_position):
            family.add_metric([str(place)], count)
        yield family
    tau = "Tokens that a forward gives an answer, since the server began; 1 without drafts"
    yield _Gauge("nucleate_draft_tau", tau, drafts.mean_acceptance_length)
    yield _Total("nucleate_draft_seconds", "Seconds for drafts", drafts.draft_seconds)


def _renamed(family: Metric, name: str) -> Metric:
    made = Metric(name, f"As {family.name}", family.type)
    made.samples = [each._replace(name=each.name.replace(family.name, name, 1)) for each in family.samples]
    return made
