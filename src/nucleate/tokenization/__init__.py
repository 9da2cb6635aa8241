"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop rules. Knows no model and no logits."""
