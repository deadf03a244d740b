"""Left staircase: closed forms and exact minima in float64, without randomness. Never imports experiment."""
