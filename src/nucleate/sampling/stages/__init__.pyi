# The stages as type checkers see them. Made by `make docs`; do not edit.

from nucleate.sampling.stage import Stage
from nucleate.sampling.stages.constraints.allowed import Allowed as Allowed
from nucleate.sampling.stages.constraints.bad_words import BadWords as BadWords
from nucleate.sampling.stages.constraints.logit_bias import LogitBias as LogitBias
from nucleate.sampling.stages.constraints.mask import Mask as Mask
from nucleate.sampling.stages.constraints.min_tokens import MinTokens as MinTokens
from nucleate.sampling.stages.constraints.suppress import Suppress as Suppress
from nucleate.sampling.stages.penalties.dry import Dry as Dry
from nucleate.sampling.stages.penalties.frequency import Frequency as Frequency
from nucleate.sampling.stages.penalties.no_repeat_ngram import NoRepeatNgram as NoRepeatNgram
from nucleate.sampling.stages.penalties.presence import Presence as Presence
from nucleate.sampling.stages.penalties.repetition import Repetition as Repetition
from nucleate.sampling.stages.selection.categorical import Categorical as Categorical
from nucleate.sampling.stages.selection.greedy import Greedy as Greedy
from nucleate.sampling.stages.selection.gumbel import Gumbel as Gumbel
from nucleate.sampling.stages.selection.logprobs import Logprobs as Logprobs
from nucleate.sampling.stages.temperature.adaptive_p import AdaptiveP as AdaptiveP
from nucleate.sampling.stages.temperature.dynamic_temperature import DynamicTemperature as DynamicTemperature
from nucleate.sampling.stages.temperature.temperature import Temperature as Temperature
from nucleate.sampling.stages.truncation.epsilon import Epsilon as Epsilon
from nucleate.sampling.stages.truncation.eta import Eta as Eta
from nucleate.sampling.stages.truncation.min_p import MinP as MinP
from nucleate.sampling.stages.truncation.mirostat import Mirostat as Mirostat
from nucleate.sampling.stages.truncation.p_less import PLess as PLess
from nucleate.sampling.stages.truncation.top_a import TopA as TopA
from nucleate.sampling.stages.truncation.top_h import TopH as TopH
from nucleate.sampling.stages.truncation.top_k import TopK as TopK
from nucleate.sampling.stages.truncation.top_n_sigma import TopNSigma as TopNSigma
from nucleate.sampling.stages.truncation.top_p import TopP as TopP
from nucleate.sampling.stages.truncation.typical import Typical as Typical
from nucleate.sampling.stages.truncation.xtc import Xtc as Xtc

STAGES: dict[str, type[Stage]]
