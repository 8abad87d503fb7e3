"""selfspec: self-speculative decoding for causal language models, exact to the bit.

This package's top level imports nothing heavy; torch and transformers are imported inside the command bodies.
"""

__version__ = "0.1.0"
