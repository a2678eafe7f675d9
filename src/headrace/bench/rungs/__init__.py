"""The lower rungs of `headrace bench ladder`: the small server that one writes first, with the same model, weights and kernels as Headrace.

`python -m headrace.bench.rungs MODEL --port PORT` answers one request after the other. `--max-batch` and `--window-ms` make it wait for others and
answer them together; `--kept-tokens` makes it keep the keys and values of prompts. There is no scheduler, no paged storage and no second process.
"""
