"""Did training hurt anything? Perplexity against the base, and decoding with speculation against decoding without."""
