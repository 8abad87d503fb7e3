"""Loading a checkpoint and running it layer by layer over one shared KV cache. Knows no drafter and no command."""
