"""Metrics: values, text format, and a bounded number of labels."""

from __future__ import annotations

import math
from typing import get_args

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from nucleate.outputs import EngineStats, FinishReason, SpeculativeStats
from nucleate.server.metrics import BUCKETS, GENERATION_ROUTES, ErrorKind, Metrics
from nucleate.structured_output.spec import KINDS

STATS = EngineStats(
    3, 5, 40, 10, 70, 900, 160, 80, 600, 2, 1.5, 0.25, 0.125, 77, SpeculativeStats(40, 90, 60, (40, 30), (35, 25), 0.5)
)
MODEL = {"model_name": "tiny"}
SECONDS = st.one_of(
    st.sampled_from(BUCKETS), st.floats(0, 100), st.sampled_from([0.0, 1e-9, math.nextafter(60, 61), 1e6])
)


def metrics() -> Metrics:
    return Metrics("tiny", lambda: STATS)


def families(made: Metrics) -> dict[str, Metric]:
    """The metric families that a scraper reads, by name."""
    rendered, kind = made.render()
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    found = list(read_text(rendered.decode()))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def value(made: Metrics, name: str, **labels: str) -> float | None:
    """The value of one sample of this model; None if there is none."""
    return made.registry.get_sample_value(name, {**MODEL, **labels})


def used() -> Metrics:
    """Metrics with some values of every kind."""
    made = metrics()
    made.count_request(GENERATION_ROUTES[0], 200, 0.5)
    made.count_request(GENERATION_ROUTES[1], 503, 0.5, error="queue_full")
    made.count_request("", 404, 0.0001, disconnected=True)
    made.prompt_tokens.inc(3)
    made.time_to_first_token.observe(0.02)
    made.inter_token_latency.observe(1e9)
    made.count_finished_sequence("length")
    made.structured_outputs.labels("regex").inc()
    made.count_rejected("structured_outputs")
    return made


def test_engine_metrics() -> None:
    made = metrics()
    rendered = {sample.name: sample.value for family in families(made).values() for sample in family.samples}
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 5,
        "kv_cache_blocks": 40,
        "kv_cache_blocks_used": 10,
        "kv_cache_usage_perc": 0.25,
        "forward_tokens_total": 900,
        "prefix_cache_queries_total": 160,
        "prefix_cache_hits_total": 80,
        "generation_tokens_total": 677,
        "sampled_tokens_total": 600,
        "jump_forward_tokens_total": 77,
        "num_preemptions_total": 2,
        "forward_passes_total": 70,
        "forward_pass_seconds_total": 1.5,
        "sampling_seconds_total": 0.25,
        "grammar_mask_seconds_total": 0.125,
        "spec_decode_num_steps_total": 40,
        "spec_decode_num_draft_tokens_total": 90,
        "spec_decode_num_accepted_tokens_total": 60,
        "spec_decode_mean_acceptance_length": 2.5,
        "spec_decode_draft_seconds_total": 0.5,
    }
    assert {name: rendered["nucleate_" + name] for name in expected} == expected
    counters = ("prefix_cache_queries", "prefix_cache_hits", "generation_tokens", "num_preemptions")
    counters += ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    aliases = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", *(f"{c}_total" for c in counters))
    assert {name: rendered["vllm:" + name] for name in aliases} == {name: expected[name] for name in aliases}
    for prefix in ("nucleate_", "vllm:"):
        name = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
        assert [value(made, name, position=position) for position in "012"] == [35, 25, None]


def test_every_standard_metric_exists_before_the_first_request() -> None:
    names = {sample.name for family in families(metrics()).values() for sample in family.samples}
    for histogram in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f"vllm:{histogram}_seconds_bucket" in names
    assert {"vllm:prompt_tokens_total", "vllm:request_success_total", "nucleate_request_errors_total"} <= names
    assert all(name.startswith(("nucleate_", "vllm:")) for name in names)


def test_engine_stats_are_read_once_per_scrape_and_never_while_counting() -> None:
    reads: list[int] = []
    empty = STATS._replace(num_kv_blocks=0, num_used_kv_blocks=0)
    made = Metrics("tiny", lambda: (reads.append(0), empty)[1])
    made.inter_token_latency.observe(0.1)
    made.count_request("/v1/models", 200, 0.1)
    assert not reads
    made.render()
    assert len(reads) == 1
    assert value(made, "nucleate_kv_cache_usage_perc") == 0


def test_servers_in_one_process_have_separate_metrics() -> None:
    one, two = metrics(), metrics()
    one.inter_token_latency.observe(0.1)
    assert [value(made, "nucleate_inter_token_latency_seconds_count") for made in (one, two)] == [1, 0]
    assert b"nucleate" not in prometheus_client.generate_latest()


@pytest.mark.slow
def test_a_strict_parser_reads_the_same_samples() -> None:
    made = used()
    # without escaping it writes other names than the text format
    strict = openmetrics_text(made.registry, escaping=ALLOWUTF8).decode()
    assert {family.name: family for family in read_openmetrics(strict)} == families(made)
    samples = [sample for family in families(made).values() for sample in family.samples]
    assert len({(sample.name, *sorted(sample.labels.items())) for sample in samples}) == len(samples)
    for sample in samples:
        assert value(made, sample.name, **{k: v for k, v in sample.labels.items() if k not in MODEL}) == sample.value


def test_counters_end_in_total_and_gauges_do_not() -> None:
    for family in families(used()).values():
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {family.name + "_total"}
        else:
            assert family.type in {"gauge", "histogram"}
            assert not any(sample.name.endswith("_total") for sample in family.samples)
        assert all(sample.labels["model_name"] == "tiny" for sample in family.samples)
        assert family.documentation


def slow_histogram(observed: list[float]) -> dict[str, float]:
    """Bucket counts of a histogram, by definition."""
    return {end: sum(seconds <= float(end) for seconds in observed) for end in [*map(str, BUCKETS), "+Inf"]}


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(SECONDS, max_size=20), st.permutations(["time_to_first_token", "inter_token_latency"]))
def test_histogram_buckets_match_the_definition(observed: list[float], names: list[str]) -> None:
    made = metrics()
    for seconds in observed:
        getattr(made, names[0]).observe(seconds)
    name, other = (f"{one}_seconds" for one in names)
    found = families(made)
    for prefix in ("nucleate_", "vllm:"):
        samples = found[prefix + name].samples
        buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
        rest = {sample.name: sample.value for sample in samples if not sample.name.endswith("_bucket")}
        assert buckets == slow_histogram(observed)
        assert rest == {prefix + name + "_count": len(observed), prefix + name + "_sum": pytest.approx(sum(observed))}
    assert value(made, f"nucleate_{other}_count") == 0


def test_buckets_cover_a_millisecond_to_a_minute() -> None:
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert (BUCKETS[0], BUCKETS[-1]) == (0.001, 60)


def test_requests_by_route_and_status() -> None:
    made = metrics()
    made.count_request("/v1/completions", 200, 0.5)
    made.count_request("/v1/completions", 200, 0.7)
    made.count_request("/v1/completions", 400, 0.001)
    made.count_request("/v1/chat/completions", 200, 2.0)
    made.count_request("/health", 200, 0.001)
    counted = {("/v1/completions", "200"): 2, ("/v1/completions", "400"): 1, ("/health", "200"): 1}
    for (route, status), count in counted.items():
        assert value(made, "nucleate_http_requests_total", route=route, status=status) == count
    duration = "nucleate_http_request_duration_seconds"
    assert value(made, f"{duration}_count", route="/v1/completions") == 2  # the rejected request is not counted
    assert value(made, f"{duration}_sum", route="/v1/completions") == pytest.approx(1.2)
    assert value(made, f"{duration}_bucket", route="/v1/completions", le="0.5") == 1
    assert value(made, "vllm:e2e_request_latency_seconds_count") == 3  # only routes that generate text
    assert value(made, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(3.2)
    assert value(made, "vllm:e2e_request_latency_seconds_bucket", le="0.75") == 2
    assert value(made, f"{duration}_count", route="/v1/completions") == 2  # a scrape changes nothing


def test_errors_and_client_disconnects() -> None:
    made = metrics()
    made.count_request(GENERATION_ROUTES[0], 500, 0.1)
    made.count_request(GENERATION_ROUTES[0], 503, 0.1, error="queue_full")
    made.count_request(GENERATION_ROUTES[0], 200, 0.1, error="model")  # during the stream
    made.count_request(GENERATION_ROUTES[0], 200, 0.1, disconnected=True)
    made.count_request(GENERATION_ROUTES[0], 404, 0.1)
    rendered = {kind: value(made, "nucleate_request_errors_total", kind=kind) for kind in get_args(ErrorKind)}
    assert rendered == {**dict.fromkeys(get_args(ErrorKind), 0), "internal": 1, "queue_full": 1, "model": 1}
    assert value(made, "nucleate_client_disconnects_total") == 1
    assert value(made, "nucleate_http_request_duration_seconds_count", route=GENERATION_ROUTES[0]) is None
    assert value(made, "nucleate_http_requests_total", route=GENERATION_ROUTES[0], status="200") == 2


def test_prompts_and_completions() -> None:
    made = metrics()
    made.prompt_tokens.inc(7)
    made.prompt_tokens.inc(5)
    for reason in ("stop", "stop", "length", "error"):
        made.count_finished_sequence(reason)  # type: ignore[arg-type]
    for name in ("nucleate_prompt_tokens_total", "vllm:prompt_tokens_total"):
        assert value(made, name) == 12
    rendered = {reason: value(made, "nucleate_finished_sequences_total", finish_reason=reason) for reason in REASONS}
    assert rendered == {"stop": 2, "length": 1, "tool_calls": 0, "abort": 0, "error": 1}
    alias = {reason: value(made, "vllm:request_success_total", finished_reason=reason) for reason in REASONS}
    assert alias == {"stop": 2, "length": 1, "tool_calls": 0, "abort": 0, "error": None}


REASONS = get_args(FinishReason)


@pytest.mark.parametrize("name", ['a"b', "a\\n", "a\nb 1", 'x"} 1\nforged 2', "\u00e9\u2028\r", "", "\udc80"])
def test_any_model_name_is_a_valid_label(name: str) -> None:
    made = Metrics(name, lambda: STATS)
    text = made.render()[0].decode()
    names = {s.labels["model_name"] for f in read_text(text) for s in f.samples}
    assert names == {name.encode(errors="backslashreplace").decode()}
    assert "\nforged" not in text


def test_structured_output_is_counted_by_kind_and_rejections_separately() -> None:
    made = metrics()
    name = "nucleate_structured_output_requests_total"
    assert [value(made, name, kind=kind) for kind in KINDS] == [0] * 6
    for kind in ("regex", "json_schema", "regex"):
        made.structured_outputs.labels(kind).inc()
    for field in ("response_format", "structured_outputs", "structured_outputs", "temperature", "regex", "prompt"):
        made.count_rejected(field)
    assert value(made, name, kind="regex") == 2
    assert value(made, name, kind="json_schema") == 1
    assert value(made, "nucleate_structured_output_errors_total") == 3
