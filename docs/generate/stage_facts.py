"""Facts about stages that their files do not have: an example for the plot, and the names in other projects.

How a stage differs from the one of another project is in docs/differences.md, from where the pages take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nucleate.sampling import stages
from nucleate.sampling.stage import Stage
from nucleate.sampling.watermark_key import WatermarkKey

PROMPT, OUTPUT = (3, 9, 5), (1, 4, 0, 1, 4)
"""The history of the examples."""
KEY = WatermarkKey(b"a key for the documentation")


@dataclass(frozen=True)
class Facts:
    """example: the stage with the parameters of the plot. others: the name of its parameters by project.

    note: what the plot shows besides the stage. companion, masked: whether the example has a companion, or a mask.
    """

    example: Stage
    others: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    companion: bool = False
    masked: bool = False


_HISTORY = "The prompt is the tokens 3, 9, 5, and the output so far 1, 4, 0, 1, 4."
_SAME = ("vLLM", "Transformers", "llama.cpp")


def _named(name: str, *projects: str, **others: str) -> dict[str, str]:
    return {**dict.fromkeys(projects, f"`{name}`"), **{p: f"`{n}`" for p, n in others.items()}}


FACTS: Mapping[str, Facts] = {
    "guidance": Facts(
        stages.Guidance(1.5, (0,)), {"Transformers": "`guidance_scale`, `negative_prompt_ids`"}, companion=True
    ),
    "contrastive": Facts(stages.Contrastive(0.5, alpha=0.1), companion=True),
    "kgw": Facts(stages.Kgw(2.0, key=KEY), note=_HISTORY),
    "logit_bias": Facts(
        stages.LogitBias({2: 1.5, 0: -1.0}),
        {
            "OpenAI": "`logit_bias`",
            "vLLM": "`logit_bias`",
            "Transformers": "`sequence_bias`",
            "llama.cpp": "`logit_bias`",
        },
    ),
    "encoder_repetition": Facts(
        stages.EncoderRepetition(1.5),
        _named("encoder_repetition_penalty", "Transformers", "text-generation-webui"),
        _HISTORY,
    ),
    "repetition": Facts(
        stages.Repetition(1.5),
        {
            **_named("repetition_penalty", "vLLM", "Transformers"),
            "llama.cpp": "`repeat_penalty`, `repeat_last_n`",
            "Ollama": "`repeat_penalty`, `repeat_last_n`",
            "koboldcpp": "`rep_pen`, `rep_pen_range`",
            "text-generation-webui": "`repetition_penalty_range`",
            "ExLlamaV2": "`token_repetition_range`",
        },
        _HISTORY,
    ),
    "frequency": Facts(stages.Frequency(0.7), _named("frequency_penalty", "OpenAI", "vLLM", "llama.cpp"), _HISTORY),
    "presence": Facts(stages.Presence(0.9), _named("presence_penalty", "OpenAI", "vLLM", "llama.cpp"), _HISTORY),
    "dry": Facts(
        stages.Dry(0.8, breakers=()),
        {"llama.cpp": "`dry_multiplier`, `dry_base`, `dry_allowed_length`, `dry_penalty_last_n`"},
        f"{_HISTORY} It ends with 1, 4, which token 0 followed before.",
    ),
    "no_repeat_ngram": Facts(
        stages.NoRepeatNgram(3), _named("no_repeat_ngram_size", "Transformers"), f"{_HISTORY} 1, 4, 0 would repeat."
    ),
    "min_tokens": Facts(
        stages.MinTokens(10, ends=(0,)),
        {"vLLM": "`min_tokens`", "Transformers": "`min_new_tokens`"},
        "Token 0 is EOS, and the output has 5 tokens.",
    ),
    "bad_words": Facts(
        stages.BadWords(((4, 2),)),
        {"vLLM": "`bad_words`", "Transformers": "`bad_words_ids`"},
        f"{_HISTORY} The bad word is the tokens 4, 2.",
    ),
    "suppress": Facts(stages.Suppress((1, 3)), _named("suppress_tokens", "Transformers")),
    "allowed": Facts(stages.Allowed((1, 3, 6, 8)), _named("allowed_token_ids", "vLLM")),
    "mask": Facts(stages.Mask(), note="The mask forbids the tokens with an odd id.", masked=True),
    "temperature": Facts(
        stages.Temperature(0.6),
        {**_named("temperature", "OpenAI", "vLLM", "Transformers"), "llama.cpp": "`temp`"},
    ),
    "dynamic_temperature": Facts(stages.DynamicTemperature(0.2, 0.7)),
    "quadratic": Facts(
        stages.Quadratic(0.3),
        dict.fromkeys(("koboldcpp", "text-generation-webui"), "`smoothing_factor`, `smoothing_curve`"),
    ),
    "top_n_sigma": Facts(stages.TopNSigma(1.0), {"llama.cpp": "`top_n_sigma`", "koboldcpp": "`nsigma`"}),
    "top_k": Facts(stages.TopK(5), _named("top_k", *_SAME)),
    "typical": Facts(stages.Typical(0.7), _named("typical_p", "Transformers", "llama.cpp")),
    "min_p": Facts(stages.MinP(0.2), _named("min_p", *_SAME)),
    "top_a": Facts(stages.TopA(0.5), _named("top_a", "KoboldAI")),
    "epsilon": Facts(stages.Epsilon(0.05), _named("epsilon_cutoff", "Transformers")),
    "eta": Facts(stages.Eta(0.2), _named("eta_cutoff", "Transformers")),
    "p_less": Facts(stages.PLess(True)),
    "top_h": Facts(stages.TopH(0.5), _named("top_h", "Transformers")),
    "mirostat": Facts(
        stages.Mirostat(1.5), dict.fromkeys(("llama.cpp", "Ollama"), "`mirostat` 2, `mirostat_tau`, `mirostat_eta`")
    ),
    "mirostat_v1": Facts(
        stages.MirostatV1(1.5), dict.fromkeys(("llama.cpp", "Ollama"), "`mirostat` 1, `mirostat_tau`, `mirostat_eta`")
    ),
    "top_p": Facts(stages.TopP(0.8), _named("top_p", "OpenAI", *_SAME)),
    "xtc": Facts(stages.Xtc(1.0, threshold=0.1), _named("xtc_probability`, `xtc_threshold", "llama.cpp")),
    "adaptive_p": Facts(stages.AdaptiveP(0.15), _named("adaptive_target", "llama.cpp")),
    "synthid": Facts(stages.SynthId(3, key=KEY), note=f"{_HISTORY} The example has 3 layers; by default there are 30."),
    "logprobs": Facts(
        stages.Logprobs(5),
        {
            "OpenAI": "`logprobs`, `top_logprobs`",
            "vLLM": "`logprobs`",
            "llama.cpp": "`n_probs`",
            "Transformers": "`output_scores`, `output_logits`",
        },
    ),
    "greedy": Facts(stages.Greedy(), {"Transformers": "`do_sample=False`", "llama.cpp": "`greedy`"}),
    "categorical": Facts(stages.Categorical(), {"Transformers": "`torch.multinomial`", "llama.cpp": "`dist`"}),
    "gumbel": Facts(stages.Gumbel()),
    "gumbel_watermark": Facts(stages.GumbelWatermark(key=KEY)),
}
