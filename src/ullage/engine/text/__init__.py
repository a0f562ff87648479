"""Text to tokens and back: the tokenizer, its chat template, the stream of an answer's text."""
