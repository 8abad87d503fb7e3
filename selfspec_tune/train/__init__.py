"""Continued pretraining with layer dropout and early-exit losses, after LayerSkip (arXiv 2404.16710)."""
