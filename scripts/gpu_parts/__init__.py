"""The parts of `gpu_check.py`: ops, exactness, plain decoding, rounds and sizes; `part` has what they share."""
