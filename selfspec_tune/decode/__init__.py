"""Decoding: draft, verify, accept, commit. Knows the model layer by layer, but no file formats and no command."""
