"""Words: tokenizer, templates, detokenizer."""
