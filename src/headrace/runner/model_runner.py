"""Runs plans with a real model on CPU or one CUDA device."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.config import CompileStatus, EngineConfig, EngineInfo
from headrace.core.messages import Kernel, Row, SampledRow, SlotStart, StepPlan, StepResult, TokenLogprobs
from headrace.models.content_digest import content_digest
from headrace.models.decoder import Decoder
from headrace.models.loader import load_config, load_model, weight_bytes
from headrace.models.packed import PackedDecoder
from headrace.runner.artifacts import lend_kernels
from headrace.runner.batch_inputs import Batch, BatchInputs
from headrace.runner.compiled import CompiledSteps, compiled_by_torch
from headrace.runner.deterministic import make_deterministic
from headrace.runner.device import kv_budget, resolve_device, resolve_dtype, resolve_kv_dtype
from headrace.runner.draws import request_key, unseeded_key
from headrace.runner.execution_path import choose_path
from headrace.runner.grammar_masks import GrammarMasks
from headrace.runner.interface import LOST_SLOT, NON_FINITE, GrammarSource
from headrace.runner.kernel_profile import KernelProfile
from headrace.runner.kv_pages import KVPages
from headrace.runner.kv_storage import KVCaches, KVShape, KVStorage, size_storage
from headrace.runner.logprobs import token_logprobs
from headrace.runner.memory import available_host_memory, physical_cores
from headrace.runner.pooling import PromptPooler
from headrace.runner.preparation import Preparation
from headrace.runner.row_outcome import NOTHING, Outcome, outcomes_of
from headrace.runner.sampler import Sampler
from headrace.runner.sampling_table import SamplingTable
from headrace.runner.token_history import TokenHistory
from headrace.sampling_params import SamplingParams

_PROMPT_LOGITS = 1 << 22  # logits of prompt positions that are held at once
MAX_MASK_THREADS = 4
_WARM_UP_TOKENS = 24  # not a whole number of blocks of the usual size: the decode step has room


class ModelRunner:
    """See `headrace.runner.interface.Runner`. Loading raises `ConfigError` and `ModelLoadError`.

    `grammars`: where requests with `params.structured` have theirs; without it they fail.
    """

    def __init__(self, config: EngineConfig, grammars: GrammarSource | None = None) -> None:
        self._config = config
        self._grammars = grammars
        self._device = resolve_device(config.device)
        self._threads = config.threads or physical_cores()
        torch.set_num_threads(1)  # loading is many small copies: handing each to a pool costs more than it saves, most of all beside other work
        self._dtype = resolve_dtype(config.dtype, self._device, load_config(config.model).torch_dtype)
        artifacts = None if config.artifacts is None else lend_kernels(config.artifacts)
        self._path = choose_path(config, self._device, self._dtype)
        self._model = load_model(
            config.model, dtype=self._dtype, device=self._device, packed=self._path.packed, kernels=self._path.kernels, bits=self._path.bits
        )
        torch.set_num_threads(self._threads)
        if self._path.wide:
            assert isinstance(self._model, PackedDecoder), "only weights in blocks have such a path"
            self._model.use_16_bit_activations()
        if config.deterministic:
            make_deterministic(self._model)
        model_config = self._model.config
        self.block_size = config.block_size
        self.vocab_size = model_config.vocab_size
        self.eos_token_ids = model_config.eos_token_ids
        self._seed = secrets.randbits(64) if config.seed is None else config.seed
        self._profile: KernelProfile | None = None
        self._steps = CompiledSteps("off", self._general)
        self._model_seconds = self._input_seconds = self._sample_seconds = 0.0  # of the step that runs

        shape = KVShape(
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            block_size=config.block_size,
            dtype=resolve_kv_dtype(config.kv_cache_dtype, self._dtype, self._path),
        )
        model_limit = model_config.max_position_embeddings
        peak = self._peak_bytes(shape, min(config.max_model_len or model_limit, model_limit)) if self._device.type == "cuda" else 0
        budget = kv_budget(config, self._device, peak)
        sizes = size_storage(config, shape, model_limit=model_limit, budget=budget, available=available_host_memory())
        self.num_blocks, self.num_host_blocks = sizes.num_blocks, sizes.num_host_blocks
        self._use(KVStorage(shape, num_blocks=sizes.num_blocks, num_host_blocks=sizes.num_host_blocks, device=self._device), sizes.max_model_len)
        self._dry_run(min(_WARM_UP_TOKENS, self.max_model_len, self.num_blocks * self.block_size, config.max_num_batched_tokens))
        self._preparation = Preparation(
            config, self._model, max_model_len=self.max_model_len, caches=self._storage.caches, artifacts=artifacts, general=self._general
        )
        self._steps = self._preparation.steps

    def _use(self, storage: KVStorage, max_model_len: int) -> None:
        config = self._config
        num_slots = config.max_num_seqs
        self.max_model_len = max_model_len
        self._storage, self._pages = storage, KVPages(storage)
        self._history = TokenHistory(num_slots=num_slots, max_model_len=max_model_len)
        self._table = SamplingTable(num_slots)
        self._masks = GrammarMasks(self._grammars, num_slots=num_slots, num_threads=min(MAX_MASK_THREADS, self._threads))
        self._unfit: list[str | None] = [None] * num_slots  # why a slot's request can't run
        self._prompt_counts: list[int | None] = [None] * num_slots  # params.prompt_logprobs
        self._pooler = PromptPooler(num_slots)
        self._inputs = BatchInputs(
            history=self._history,
            max_num_tokens=config.max_num_batched_tokens,
            max_blocks=-(-max_model_len // config.block_size),
            block_size=config.block_size,
            device=self._device,
            deterministic=config.deterministic,
        )
        self._sampler = Sampler(table=self._table, history=self._history, masks=self._masks, vocab_size=self.vocab_size, device=self._device)

    @property
    def model(self) -> Decoder:
        return self._model

    @property
    def caches(self) -> KVCaches:
        return self._storage.caches

    def info(self, load_seconds: float) -> EngineInfo:
        return EngineInfo(
            model=self._config.model,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            embedding_size=self._model.config.hidden_size,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=str(self._dtype).removeprefix("torch."),
            device=str(self._device),
            threads=self._threads,
            path=self._path.name,
            kv_cache_dtype=str(self._storage.shape.dtype).removeprefix("torch."),
            kv_bytes=self._storage.num_bytes,
            weight_bytes=weight_bytes(self._model),
            load_seconds=load_seconds,
        )

    def start_preparation(self, on_change: Callable[[], None]) -> None:
        self._preparation.start(on_change)
        self._pages.start()

    def compile_status(self) -> CompileStatus:
        return self._steps.status()

    def start_profile(self) -> None:
        self._profile = KernelProfile(self._device)

    def stop_profile(self) -> Callable[[], tuple[Kernel, ...]]:
        assert self._profile is not None, "start_profile comes first"
        profile, self._profile = self._profile, None
        return profile.stop()

    def kv_identity(self) -> dict[str, str]:
        shape = self._storage.shape
        return {
            "model": content_digest(self._config.model),
            "execution path": self._path.name,
            "determinism": str(self._config.deterministic),
            "dtype": str(self._dtype).removeprefix("torch."),
            "KV dtype": str(shape.dtype).removeprefix("torch."),
            "block size": str(shape.block_size),
            "layers": str(shape.num_layers),
            "heads": f"{shape.num_kv_heads} x {shape.head_dim}",
        }

    def read_block(self, block: int) -> bytes:
        return self._storage.read_block(block)

    def write_block(self, block: int, data: bytes) -> None:
        self._storage.write_block(block, data)

    def close(self) -> None:
        self._preparation.close()
        self._masks.close()
        self._pages.close()
        del self._model, self._storage, self._pages
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def execute(self, plan: StepPlan) -> StepResult:
        begin, frames = time.perf_counter(), compiled_by_torch()
        self._model_seconds = self._input_seconds = self._sample_seconds = 0.0
        try:
            with torch.inference_mode():
                rows = self._run(plan)
        except BaseException:
            for row in plan.rows:
                self._history.release(row.slot)
            raise
        return StepResult(
            step_id=plan.step_id,
            rows=rows,
            seconds=time.perf_counter() - begin,
            model_seconds=self._model_seconds,
            input_seconds=self._input_seconds,
            sample_seconds=self._sample_seconds,
            padded_tokens=self._steps.last_padding if self._model_seconds else 0,
            path=self._steps.last_path,
            compiled=compiled_by_torch() != frames,
        )

    def _run(self, plan: StepPlan) -> tuple[SampledRow, ...]:
        self._storage.swap_out(plan.swap_out)
        self._storage.swap_in(plan.swap_in)
        self._storage.copy(plan.copies)
        for start in plan.starts:
            self._start(start)
        results: dict[int, SampledRow] = {}
        live: list[int] = []
        for index, row in enumerate(plan.rows):
            error = self._unfit[row.slot] if self._history.holds(row) else LOST_SLOT
            if error is None:
                self._inputs.place_blocks(row)
                self._pages.use(row.new_block_ids)
                live.append(index)
            else:
                results[index] = SampledRow(request_id=row.request_id, error=error)
        if live:
            for index, result in zip(live, self._compute([plan.rows[index] for index in live]), strict=True):
                results[index] = result
        self._record([plan.rows[index] for index in live], [results[index] for index in live])
        return tuple(results[index] for index in range(len(plan.rows)))

    def _start(self, start: SlotStart) -> None:
        params, slot = start.params, start.slot
        self._history.start(start)
        self._prompt_counts[slot] = params.prompt_logprobs
        self._pooler.start(start)
        if params.seed is not None:
            key = request_key(params.seed, params.choice_index)
        else:
            key = unseeded_key(self._seed, start.request_id, params.choice_index)
        self._unfit[slot] = self._table.start(start, key=key, vocab_size=self.vocab_size) or self._masks.start(start)
        low, high = min(start.token_ids), max(start.token_ids)
        if low < 0 or high >= self.vocab_size:
            self._unfit[slot] = f"the prompt has token {low if low < 0 else high}; the vocabulary has {self.vocab_size}"

    def _record(self, rows: Sequence[Row], results: Sequence[SampledRow]) -> None:
        """Appends the new tokens; a failed row's request has no next token, so rows planned ahead for it must not run."""
        single: list[tuple[int, int]] = []
        for row, result in zip(rows, results, strict=True):
            if result.error is not None:
                self._history.release(row.slot)
            elif len(result.token_ids) == 1:
                single.append((row.slot, result.token_ids[0]))
            elif result.token_ids:
                self._history.extend(row.slot, result.token_ids)
        if single:
            self._history.append(*zip(*single, strict=True))

    def _compute(self, rows: Sequence[Row]) -> list[SampledRow]:
        """One forward pass over `rows`, and what each of them asks of it."""
        for row in rows:
            if row.num_speculated:
                self._history.guess(row.slot, row.token_ids[-row.num_speculated :])
        begin = time.perf_counter()
        batch = self._inputs.build(rows)
        self._input_seconds += time.perf_counter() - begin
        hidden_TE = self._forward(batch)
        first = dict(zip(batch.order, batch.query_starts[:-1], strict=True))  # token offset of each row
        last = {index: first[index] + row.num_tokens - 1 for index, row in enumerate(rows)}
        scores = [self._score_prompt(row, hidden_TE, first[index]) for index, row in enumerate(rows)]
        pooled = self._pooler.pool(rows, hidden_TE, [first[index] for index in range(len(rows))])
        sampling = [index for index, row in enumerate(rows) if row.sample]
        tokens = dict(zip(sampling, self._sample([rows[i] for i in sampling], hidden_TE, [last[i] for i in sampling]), strict=True))
        results = []
        for index, row in enumerate(rows):
            token = tokens.get(index, NOTHING)
            error = scores[index].error or token.error or _fault(pooled[index])
            if error is not None:
                results.append(SampledRow(request_id=row.request_id, error=error))
                continue
            results.append(
                SampledRow(
                    request_id=row.request_id,
                    token_ids=token.token_ids,
                    logprobs=token.logprobs,
                    complete=token.complete,
                    prompt_logprobs=scores[index].logprobs,
                    pooled=pooled[index],
                )
            )
        return results

    def _forward(self, batch: Batch) -> Tensor:
        begin = time.perf_counter()
        hidden_TE = self._steps.forward(batch)
        self._model_seconds += time.perf_counter() - begin
        return hidden_TE

    def _logits(self, hidden_RE: Tensor) -> Tensor:
        begin = time.perf_counter()
        logits_RV = self._model.compute_logits(hidden_RE)
        self._model_seconds += time.perf_counter() - begin
        return logits_RV

    def _general(self, batch: Batch) -> Tensor:
        """The ready path: any step, eagerly."""
        return self._model(batch.input_ids_T, batch.meta.positions_T, self._storage.caches, batch.meta)

    def _sample(self, rows: Sequence[Row], hidden_TE: Tensor, last: Sequence[int]) -> list[Outcome]:
        """The new tokens of each row, whose last hidden state stands at `last`."""
        if not rows:
            return []
        filled = self._history.filled_S
        assert all(row.start + row.num_tokens == filled[row.slot] for row in rows), "a row samples before its last token"
        places, slots, num_guesses = [], [], []  # of each place that is sampled from
        for row, end in zip(rows, last, strict=True):
            count = row.num_speculated + 1
            places += range(end + 1 - count, end + 1)
            slots += [row.slot] * count
            num_guesses += range(count)
        logits_RV = self._logits(hidden_TE.index_select(0, torch.tensor(places, dtype=torch.int64).to(self._device)))
        begin = time.perf_counter()
        outcomes = outcomes_of(rows, self._sampler.sample(logits_RV, slots, num_guesses))
        if self._device.type == "cuda":  # it computes while the sampler waits
            self._model_seconds += time.perf_counter() - begin
        else:
            self._sample_seconds += time.perf_counter() - begin
        for place, row in enumerate(rows):
            if outcomes[place].error == NON_FINITE:  # once more without its batch mates before the request fails
                alone = replace(row, num_tokens=row.num_tokens - row.num_speculated, num_speculated=0)
                hidden_TE = self._general(self._inputs.build([alone]))
                outcomes[place] = outcomes_of([alone], self._sampler.sample(self._model.compute_logits(hidden_TE[-1:]), [row.slot]))[0]
            outcome = outcomes[place]
            if outcome.error is None and self._masks.holds(row.slot):
                outcome.complete, outcome.error = self._masks.consume(row.slot, outcome.token_ids[-1])
        return outcomes

    def _score_prompt(self, row: Row, hidden_TE: Tensor, begin: int) -> Outcome:
        """Log probabilities of the prompt tokens at start+1 .., from the hidden states of the row's positions, which begin at `begin`."""
        most = self._prompt_counts[row.slot]
        if most is None:
            return NOTHING
        hidden_TE = hidden_TE[begin : begin + row.num_tokens]
        end = min(row.start + row.num_tokens, int(self._history.num_prompt_S[row.slot]) - 1)  # last position scored
        target_T = torch.from_numpy(self._history.tokens_SL[row.slot, row.start + 1 : max(row.start, end) + 1].astype(np.int64)).to(self._device)
        logprobs: list[TokenLogprobs] = []
        step = max(1, _PROMPT_LOGITS // self.vocab_size)
        for first in range(0, len(target_T), step):
            targets = target_T[first : first + step]
            logits_TV = self._logits(hidden_TE[first : first + len(targets)])
            if not bool(logits_TV.amax(dim=1).isfinite().all()):
                return Outcome(error=NON_FINITE)
            logprobs += token_logprobs(logits_TV, targets, [most] * len(targets))
        return Outcome(logprobs=tuple(logprobs))

    def _peak_bytes(self, shape: KVShape, max_model_len: int) -> int:
        """Most bytes that one largest step takes on CUDA beside the weights and the KV storage."""
        num_tokens = min(self._config.max_num_batched_tokens, max_model_len)
        num_blocks = -(-num_tokens // self.block_size)
        speculative = self._config.speculative_config
        most_samples = self._config.max_num_seqs * (1 if speculative is None else 1 + speculative.num_speculative_tokens)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._use(KVStorage(shape, num_blocks=num_blocks, num_host_blocks=0, device=self._device), max_model_len)
        self._dry_run(num_tokens)
        with torch.inference_mode():
            self._model.compute_logits(torch.zeros(most_samples, self._model.config.hidden_size, dtype=self._dtype, device=self._device))
        peak = torch.cuda.max_memory_allocated(self._device) - before - self._storage.num_bytes
        del self._storage, self._pages
        torch.cuda.empty_cache()
        return peak

    def _dry_run(self, num_tokens: int) -> None:
        """A prefill of `num_tokens` and, where there is room, a decode step, in blocks that nobody uses yet: what libraries set up on
        first use is set up before the first request."""
        params = SamplingParams(seed=0, top_p=0.9, logprobs=1)
        blocks = tuple(range(-(-num_tokens // self.block_size)))
        start = SlotStart(request_id="", slot=0, token_ids=(0,) * num_tokens, num_prompt_tokens=num_tokens, params=params, eos_token_ids=())
        row = Row(request_id="", slot=0, start=0, num_tokens=num_tokens, token_ids=start.token_ids, block_offset=0, new_block_ids=blocks, sample=True)
        self.execute(StepPlan(step_id=0, starts=(start,), rows=(row,)))
        if num_tokens < min(self.max_model_len, len(blocks) * self.block_size):
            row = replace(row, start=num_tokens, num_tokens=1, token_ids=(), new_block_ids=())
            self.execute(StepPlan(step_id=0, rows=(row,)))
        self._history.release(0)


def _fault(pooled: bytes | None) -> str | None:
    return None if pooled is None or np.isfinite(np.frombuffer(pooled, dtype="<f4")).all() else NON_FINITE
