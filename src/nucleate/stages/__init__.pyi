# The stages as type checkers see them. Made by `make docs`; do not edit.

from nucleate.core.stage import Stage
from nucleate.stages.adaptive_p import AdaptiveP as AdaptiveP
from nucleate.stages.allowed import Allowed as Allowed
from nucleate.stages.bad_words import BadWords as BadWords
from nucleate.stages.categorical import Categorical as Categorical
from nucleate.stages.dry import Dry as Dry
from nucleate.stages.dynamic_temperature import DynamicTemperature as DynamicTemperature
from nucleate.stages.epsilon import Epsilon as Epsilon
from nucleate.stages.eta import Eta as Eta
from nucleate.stages.frequency import Frequency as Frequency
from nucleate.stages.greedy import Greedy as Greedy
from nucleate.stages.gumbel import Gumbel as Gumbel
from nucleate.stages.logit_bias import LogitBias as LogitBias
from nucleate.stages.logprobs import Logprobs as Logprobs
from nucleate.stages.mask import Mask as Mask
from nucleate.stages.min_p import MinP as MinP
from nucleate.stages.min_tokens import MinTokens as MinTokens
from nucleate.stages.mirostat import Mirostat as Mirostat
from nucleate.stages.no_repeat_ngram import NoRepeatNgram as NoRepeatNgram
from nucleate.stages.p_less import PLess as PLess
from nucleate.stages.presence import Presence as Presence
from nucleate.stages.repetition import Repetition as Repetition
from nucleate.stages.suppress import Suppress as Suppress
from nucleate.stages.temperature import Temperature as Temperature
from nucleate.stages.top_a import TopA as TopA
from nucleate.stages.top_h import TopH as TopH
from nucleate.stages.top_k import TopK as TopK
from nucleate.stages.top_n_sigma import TopNSigma as TopNSigma
from nucleate.stages.top_p import TopP as TopP
from nucleate.stages.typical import Typical as Typical
from nucleate.stages.xtc import Xtc as Xtc

STAGES: dict[str, type[Stage]]
