"""Where the packages of a service come from: the compile cache, or the compiler. One worker compiles, whoever shares its cache waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from headrace.kernels.cpu.build import KernelBuildError, find_compiler
from headrace.runner.background import BackgroundCompiler, CompileFailed
from headrace.runner.buckets import Bucket
from headrace.runner.compile_cache import Claim, PackageStore, StoreError
from headrace.runner.packages import SECRET_VARIABLE, Facts, PackageRefused, key_of, package_facts, seal, secret, unseal

logger = logging.getLogger("headrace.compile")

_RENEW_TICKS = 5  # seconds, about


class PackageSource:
    """`wait(seconds)` sleeps and raises when the service ends; `count` is told of each compilation. Faults of the store are logged, and
    the service goes on without it."""

    def __init__(
        self,
        facts: Facts,
        store: PackageStore | None,
        compiler: BackgroundCompiler,
        wait: Callable[[float], None],
        count: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self._facts = facts
        self._store = store
        self._compiler = compiler
        self._wait = wait
        self._count = count
        self._told: set[Bucket] = set()  # whose entry was refused
        if store is not None and store.is_shared and secret() is None:
            logger.warning("compile cache %s: whoever can write there can run code here; set $%s to sign its entries", store.where, SECRET_VARIABLE)

    def cached(self, bucket: Bucket) -> bytes | None:
        """The cache's package. One that is torn, foreign or not signed is said and counts as none; it is built anew."""
        if self._store is None:
            return None
        facts = package_facts(self._facts, bucket)
        try:
            entry = self._store.get(key_of(facts))
            return None if entry is None else unseal(entry, facts, secret())
        except PackageRefused as refused:
            if bucket in self._told:
                return None
            self._told.add(bucket)
            logger.warning("compile cache %s: the entry of %s is refused: %s", self._store.where, bucket.name, refused)
        except StoreError as error:
            self._give_up_store(error)
        return None

    def build(self, bucket: Bucket, claim: Claim | None = None) -> bytes:
        """Compiles, and tells the cache. Raises `CompileFailed`."""
        ticks = 0

        def tick() -> None:
            nonlocal ticks
            self._wait(0.0)
            ticks += 1
            if claim is not None and ticks % _RENEW_TICKS == 0:
                self._tell_store(claim.renew)

        try:
            find_compiler()
        except KernelBuildError as error:
            raise CompileFailed(str(error)) from error
        self._count(bucket)
        body = self._compiler.compile(bucket, tick)
        store = self._store
        if store is not None:
            facts = package_facts(self._facts, bucket)
            self._tell_store(lambda: store.put(key_of(facts), seal(facts, body, secret())))
        return body

    def obtain(
        self,
        buckets: Sequence[Bucket],
        *,
        begin: Callable[[Bucket], None],
        found: Callable[[Bucket, bytes], None],
        failed: Callable[[Bucket, str], None],
    ) -> None:
        """Brings every bucket to `found` or `failed`, in order. `begin` is told before one is compiled here or awaited from another worker."""
        missing = list(buckets)
        while missing:
            claim = self._claim()
            try:
                missing = self._take_cached(missing, found)
                if missing:
                    begin(missing[0])
                while missing and (claim is not None or self._store is None):
                    bucket = missing.pop(0)
                    begin(bucket)
                    try:
                        body = self.cached(bucket) or self.build(bucket, claim)
                    except CompileFailed as error:
                        failed(bucket, str(error))
                    else:
                        found(bucket, body)
            finally:
                if claim is not None:
                    self._tell_store(claim.release)
            if missing:
                self._wait(1.0)

    def _take_cached(self, buckets: Sequence[Bucket], found: Callable[[Bucket, bytes], None]) -> list[Bucket]:
        missing = []
        for bucket in buckets:
            body = self.cached(bucket)
            if body is None:
                missing.append(bucket)
            else:
                found(bucket, body)
        return missing

    def _claim(self) -> Claim | None:
        """None: another worker builds for this service's facts, or there is no store."""
        if self._store is None:
            return None
        try:
            return self._store.claim(key_of(self._facts))
        except StoreError as error:
            self._give_up_store(error)
            return None

    def _tell_store(self, action: Callable[[], None]) -> None:
        try:
            action()
        except StoreError as error:
            self._give_up_store(error)

    def _give_up_store(self, error: StoreError) -> None:
        logger.warning("compile cache: %s; going on without it", error)
        self._store = None
