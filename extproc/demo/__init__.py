"""``pd-extproc demo``: the whole product on one machine, and what it does with a few requests, step by step."""
