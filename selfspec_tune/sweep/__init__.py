"""Which exit layer and how many draft tokens pay: acceptance from one pass, measured costs, a choice that is tried."""
