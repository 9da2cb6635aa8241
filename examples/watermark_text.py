"""Mark generated text with a watermark, and detect it with the key.

The Gumbel watermark derives the noise of the draw from a secret key and the last tokens. Prints the p-values of marked
and unmarked text: the probability that text written without the key has a mark at least as strong as this text.
"""

import nucleate as nc
from nucleate.watermark import GumbelWatermark, WatermarkKey, detect

key = WatermarkKey(b"keep these bytes secret!")  # in practice random bytes from a file: WatermarkKey.read("key")
other = WatermarkKey(b"somebody else's key.....")
prompt, fields = "Once upon a time", {"temperature": 1.0, "seed": 1, "max_tokens": 100}

marked = nc.LLM(watermark=GumbelWatermark(key=key)).generate(prompt, **fields)[0].outputs[0]
plain = nc.LLM().generate(prompt, **fields)[0].outputs[0]
print(marked.text, "\n")
for name, output, own in (("marked", marked, key), ("marked, wrong key", marked, other), ("unmarked", plain, key)):
    found = detect(output.token_ids, own, "gumbel")
    print(f"{name:18} p = {found.p_value:.2e} ({found.num_scored} tokens scored)")
