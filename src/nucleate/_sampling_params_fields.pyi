# The fields of SamplingParams as type checkers see them. Made by `make docs` from the stages; do not edit.

from collections.abc import Mapping, Sequence

from nucleate.structured_output.spec import StructuredOutputs

class Fields:
    def __init__(
        self,
        *,
        logit_bias: Mapping[int, float] = ...,
        repetition_penalty: float = ...,
        penalty_last_n: int | None = ...,
        frequency_penalty: float = ...,
        presence_penalty: float = ...,
        dry_multiplier: float = ...,
        dry_base: float = ...,
        dry_allowed_length: int = ...,
        dry_sequence_breakers: str | Sequence[str | Sequence[int]] | None = ...,
        dry_last_n: int = ...,
        no_repeat_ngram_size: int = ...,
        min_tokens: int = ...,
        bad_words: str | Sequence[str | Sequence[int]] = ...,
        suppress_token_ids: Sequence[int] = ...,
        allowed_token_ids: Sequence[int] | None = ...,
        temperature: float = ...,
        dynamic_temperature_low: float | None = ...,
        dynamic_temperature_high: float | None = ...,
        dynamic_temperature_exponent: float = ...,
        top_n_sigma: float = ...,
        top_k: int = ...,
        typical_p: float = ...,
        min_p: float = ...,
        top_a: float = ...,
        epsilon_cutoff: float = ...,
        eta_cutoff: float = ...,
        p_less: bool = ...,
        top_h: float | None = ...,
        mirostat_tau: float = ...,
        mirostat_eta: float = ...,
        top_p: float = ...,
        xtc_probability: float = ...,
        xtc_threshold: float = ...,
        xtc_exempt_token_ids: Sequence[int] = ...,
        adaptive_p_target: float | None = ...,
        adaptive_p_decay: float = ...,
        logprobs: int | None = ...,
        logprob_token_ids: Sequence[int] = ...,
        seed: int | None = ...,
        order: str | Sequence[str] = ...,
        draw: str = ...,
        max_tokens: int | None = ...,
        stop: str | Sequence[str] = ...,
        stop_token_ids: Sequence[int] = ...,
        stop_regex: str | Sequence[str] = ...,
        stop_json: bool = ...,
        include_stop_str_in_output: bool = ...,
        ignore_eos: bool = ...,
        structured_outputs: StructuredOutputs | Mapping[str, object] | None = ...,
        n: int = ...,
        prompt_logprobs: int | None = ...,
        logprobs_mode: str = ...,
        skip_special_tokens: bool = ...,
    ) -> None: ...
    @property
    def logit_bias(self) -> Mapping[int, float]:
        """Map from token id to a number that is added to its logit (a mapping of token ids (>= 0) to finite numbers; default {})."""
    @property
    def repetition_penalty(self) -> float:
        """Divides positive and multiplies negative logits of tokens that occurred; below 1 it rewards them (a number > 0; default 1.0)."""
    @property
    def penalty_last_n(self) -> int | None:
        """Number of last tokens of prompt and output that the penalties count (-1: all); none: repetition counts prompt and output, frequency and presence the output (an integer >= -1 or none; default none)."""
    @property
    def frequency_penalty(self) -> float:
        """Subtracted from a token's logit for each time it occurs in the output (a number >= -2 and <= 2; default 0.0)."""
    @property
    def presence_penalty(self) -> float:
        """Subtracted from a token's logit if it occurs in the output (a number >= -2 and <= 2; default 0.0)."""
    @property
    def dry_multiplier(self) -> float:
        """Penalty, in logits, of the shortest penalised repetition; 0 disables DRY (a number >= 0; default 0.0)."""
    @property
    def dry_base(self) -> float:
        """Factor by which the penalty grows with each further repeated token (a number >= 1; default 1.75)."""
    @property
    def dry_allowed_length(self) -> int:
        """Number of tokens that may repeat before the next one is penalised (an integer >= 1; default 2)."""
    @property
    def dry_sequence_breakers(self) -> tuple[str | tuple[int, ...], ...] | None:
        """Repetitions do not continue across these: strings (every token that contains one) or lists of token ids; none: newline, ":", "*" and the double quote, if there is a tokenizer (a list of non-empty strings or non-empty lists of token ids >= 0 or none; default none)."""
    @property
    def dry_last_n(self) -> int:
        """Number of last tokens of prompt and output that are searched; -1: all (an integer >= -1; default -1)."""
    @property
    def no_repeat_ngram_size(self) -> int:
        """Length of the n-grams that must not repeat; 0: off (an integer >= 0; default 0)."""
    @property
    def min_tokens(self) -> int:
        """Minimum number of output tokens before EOS or a stop may end the output (an integer >= 0; default 0)."""
    @property
    def bad_words(self) -> tuple[str | tuple[int, ...], ...]:
        """Words that must not occur in the output: strings (these need a tokenizer) or lists of token ids (a list of non-empty strings or non-empty lists of token ids >= 0)."""
    @property
    def suppress_token_ids(self) -> tuple[int, ...]:
        """Token ids that are never sampled (a list of integers >= 0)."""
    @property
    def allowed_token_ids(self) -> tuple[int, ...] | None:
        """The only token ids that may be sampled (a list of integers >= 0 or none; default none)."""
    @property
    def temperature(self) -> float:
        """Divides the logits; below 1 sharpens the distribution, 0 selects the most likely token (a number >= 0; default 1.0)."""
    @property
    def dynamic_temperature_low(self) -> float | None:
        """Temperature at zero entropy (a number >= 0 or none; default none)."""
    @property
    def dynamic_temperature_high(self) -> float | None:
        """Temperature at maximum entropy (a number >= 0 or none; default none)."""
    @property
    def dynamic_temperature_exponent(self) -> float:
        """Exponent of the normalised entropy (a number >= 0; default 1.0)."""
    @property
    def top_n_sigma(self) -> float:
        """Maximum distance from the highest logit, in standard deviations; 0: off (a number >= 0; default 0.0)."""
    @property
    def top_k(self) -> int:
        """Number of most likely tokens to keep; 0 or -1: all (an integer >= 0 and <= 2**31 - 1 or -1; default 0)."""
    @property
    def typical_p(self) -> float:
        """Cumulative probability of the locally typical tokens to keep; 1: all (a number > 0 and <= 1; default 1.0)."""
    @property
    def min_p(self) -> float:
        """Minimum probability of a token, relative to the most likely one; 0: off (a number >= 0 and <= 1; default 0.0)."""
    @property
    def top_a(self) -> float:
        """Minimum probability of a token, as a factor of the squared highest probability; 0: off (a number >= 0 and <= 1; default 0.0)."""
    @property
    def epsilon_cutoff(self) -> float:
        """Minimum probability of a token; 0: off (a number >= 0 and <= 1; default 0.0)."""
    @property
    def eta_cutoff(self) -> float:
        """Minimum probability of a token, lower in flat distributions; 0: off (a number >= 0 and <= 1; default 0.0)."""
    @property
    def p_less(self) -> bool:
        """Remove tokens less likely than the sum of the squared probabilities (true or false; default false)."""
    @property
    def top_h(self) -> float | None:
        """Maximum part of the entropy that the kept tokens contribute (a number > 0 and <= 1 or none; default none)."""
    @property
    def mirostat_tau(self) -> float:
        """Target surprise, in bits; 0: off (a number >= 0; default 0.0)."""
    @property
    def mirostat_eta(self) -> float:
        """Learning rate of mu (a number >= 0; default 0.1)."""
    @property
    def top_p(self) -> float:
        """Cumulative probability of the most likely tokens to keep; 1: all (a number > 0 and <= 1; default 1.0)."""
    @property
    def xtc_probability(self) -> float:
        """Probability, per step, of removing the top choices; 0: off (a number >= 0 and <= 1; default 0.0)."""
    @property
    def xtc_threshold(self) -> float:
        """Minimum probability of the tokens that are removed (a number >= 0 and <= 0.5; default 0.1)."""
    @property
    def xtc_exempt_token_ids(self) -> tuple[int, ...]:
        """Token ids that are never removed (a list of integers >= 0)."""
    @property
    def adaptive_p_target(self) -> float | None:
        """Target probability of sampled tokens (a number >= 0 and <= 1 or none; default none)."""
    @property
    def adaptive_p_decay(self) -> float:
        """Decay, per token, of the weight of earlier tokens in the mean (a number >= 0 and <= 0.99; default 0.9)."""
    @property
    def logprobs(self) -> int | None:
        """Number of most likely tokens to report logprobs for, in addition to the sampled one (an integer >= 0 or none; default none)."""
    @property
    def logprob_token_ids(self) -> tuple[int, ...]:
        """Further token ids to report logprobs for (a list of integers >= 0)."""
    @property
    def seed(self) -> int | None:
        """Random seed, 0 to 2**64 - 1; none: a random one (an integer >= 0 and <= 2**64 - 1 or none; default none)."""
    @property
    def order(self) -> str | tuple[str, ...]:
        """Order of the stages: a preset or a list of stage names (one of canonical, vllm, hf, llama.cpp, akunu or a list of stage names; default canonical)."""
    @property
    def draw(self) -> str:
        """How the token is selected: gumbel (Gumbel-max), categorical (inverse CDF) or greedy (one of greedy, categorical, gumbel; default gumbel)."""
    @property
    def max_tokens(self) -> int | None:
        """Maximum number of output tokens; none: all that fit the context (an integer >= 1 or none; default none)."""
    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end the output; the text is cut before them (a non-empty string or a list of such)."""
    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end the output, in addition to EOS (a list of integers >= 0)."""
    @property
    def stop_regex(self) -> tuple[str, ...]:
        """Regular expressions that end the output; the text is cut before the match (a non-empty string or a list of such)."""
    @property
    def stop_json(self) -> bool:
        """End the output after the first complete JSON object or array (true or false; default false)."""
    @property
    def include_stop_str_in_output(self) -> bool:
        """Keep the stop string or stop token in the text (true or false; default false)."""
    @property
    def ignore_eos(self) -> bool:
        """Continue after the end-of-sequence token (true or false; default false)."""
    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """Constrain the output: a JSON schema, any JSON object, a regular expression, a list of choices or a grammar (a StructuredOutputs or a mapping of its fields or none; default none)."""
    @property
    def n(self) -> int:
        """Number of outputs per prompt; output i uses seed + i (an integer >= 1 and <= 128; default 1)."""
    @property
    def prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to report at each position of the prompt, in addition to the prompt token (an integer >= 0 or none; default none)."""
    @property
    def logprobs_mode(self) -> str:
        """Whether logprobs are of the model's logits (raw) or of the distribution after all stages (processed) (one of raw, processed; default raw)."""
    @property
    def skip_special_tokens(self) -> bool:
        """Leave special tokens out of the text (true or false; default true)."""
