"""Starts the small server; see the package."""

from __future__ import annotations

import argparse

import uvicorn

from headrace.bench.rungs.batch import Worker
from headrace.bench.rungs.plain_model import PlainModel
from headrace.bench.rungs.prefixes import KeptPrefixes
from headrace.bench.rungs.web import create_app
from headrace.config import EngineConfig
from headrace.text.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.rungs", description=__doc__)
    parser.add_argument("model", help="GGUF file or Hugging Face directory")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-batch", type=int, default=1, help="most requests that are answered together (default: 1)")
    parser.add_argument("--window-ms", type=float, default=0.0, help="how long a request waits for others (default: 0)")
    parser.add_argument("--kept-tokens", type=int, default=0, help="tokens of prompts whose keys and values are kept (default: 0)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--quantization", choices=("none", "gguf", "int8", "int4"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    config = EngineConfig(model=args.model, dtype=args.dtype, quantization=args.quantization, device=args.device, threads=args.threads)
    model = PlainModel(config)
    prefixes = KeptPrefixes(args.kept_tokens) if args.kept_tokens else None
    worker = Worker(model, max_batch=args.max_batch, window_s=args.window_ms / 1e3, prefixes=prefixes)
    app = create_app(worker, Tokenizer.load(args.model), model_name=args.model, max_length=model.max_length)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
