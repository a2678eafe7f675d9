"""Where compiled packages are kept for other workers: a folder, Redis, or anything that fsspec knows.

Three methods. `get` and `put` move whole entries, sealed by `packages.py`; what comes out is never trusted before it is unsealed. `claim`
makes builds single: the worker that holds the claim on a key compiles, others wait for the entry. A claim ends with its holder, by itself
within `CLAIM_S` where the holder died.

Raises `StoreError` where the store can't be reached; the service then compiles for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from headrace.errors import ConfigError
from headrace.kernels.cpu.build import cache_folder
from headrace.runner.packages import SECRET_VARIABLE, secret

CLAIM_S = 60.0  # a claim that is not renewed for so long has lost its holder
_REDIS_PREFIX = "headrace:compile:"


class StoreError(Exception):
    """The store can't be reached or refuses. The message says why."""


class Claim(Protocol):
    """The right to build one entry."""

    def renew(self) -> None:
        """Call it well within CLAIM_S, as long as the build goes on."""

    def release(self) -> None: ...


class PackageStore(Protocol):
    where: str  # for the log; without passwords
    is_shared: bool  # others may write to it

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, entry: bytes) -> None: ...

    def claim(self, key: str) -> Claim | None:
        """None: another worker holds it."""
        ...


def open_store(url: str | None) -> PackageStore:
    """`url`: a folder, redis://, rediss:// or unix://, or a URL of fsspec; None: a folder of this user. Raises `ConfigError`."""
    if url is None:
        return DirectoryStore(cache_folder().parent / "compile")
    scheme, separator, _ = url.partition("://")
    if not separator:
        return DirectoryStore(Path(url).expanduser().absolute())
    return RedisStore(url) if scheme in ("redis", "rediss", "unix") else FsspecStore(url)


class DirectoryStore:
    """One file an entry, written whole or not at all. Files that another user could have changed are as good as absent, unless a secret
    tells ours from theirs."""

    is_shared = False

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder

    def get(self, key: str) -> bytes | None:
        try:
            with self._file(key).open("rb") as file:
                if secret() is None:
                    _check_owner(os.fstat(file.fileno()), self._file(key))
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self.where} can't be read: {error}") from error

    def put(self, key: str, entry: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(entry)
                os.replace(temporary, self._file(key))
            finally:
                Path(temporary).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.where} can't be written: {error}") from error

    def claim(self, key: str) -> Claim | None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{self.where} can't be written: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return _FileClaim(descriptor)

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.package"


class _FileClaim:
    """A lock that the system gives back when its holder ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def renew(self) -> None:
        pass

    def release(self) -> None:
        os.close(self._descriptor)


def _check_owner(status: os.stat_result, file: Path) -> None:
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise StoreError(f"{file} could have been written by another user; delete it, or set ${SECRET_VARIABLE} for all workers")


class RedisStore:
    """Entries and claims as keys of a Redis server."""

    is_shared = True
    _RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
    _RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0"

    def __init__(self, url: str) -> None:
        try:
            import redis
        except ImportError as error:
            raise ConfigError(f"--compile-cache {_without_password(url)} needs the redis package: pip install 'headrace[redis]'.") from error
        self.where = _without_password(url)
        self._error = redis.RedisError
        try:
            self._redis = redis.Redis.from_url(url, socket_timeout=10, socket_connect_timeout=5)
        except ValueError as error:
            raise ConfigError(f"--compile-cache {self.where} is no Redis URL: {error}.") from error

    def get(self, key: str) -> bytes | None:
        with self._told():
            entry: bytes | None = self._redis.get(_REDIS_PREFIX + key)
            return entry

    def put(self, key: str, entry: bytes) -> None:
        with self._told():
            self._redis.set(_REDIS_PREFIX + key, entry)

    def claim(self, key: str) -> Claim | None:
        token = secrets.token_hex(16)
        name = f"{_REDIS_PREFIX}{key}:claim"
        with self._told():
            taken = self._redis.set(name, token, nx=True, px=int(CLAIM_S * 1000))
        return _RedisClaim(self, name, token) if taken else None

    def run(self, script: str, name: str, *values: str) -> None:
        with self._told():
            self._redis.eval(script, 1, name, *values)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (self._error, OSError) as error:
            raise StoreError(f"{self.where}: {error}") from error


class _RedisClaim:
    def __init__(self, store: RedisStore, name: str, token: str) -> None:
        self._store, self._name, self._token = store, name, token

    def renew(self) -> None:
        self._store.run(RedisStore._RENEW, self._name, self._token, str(int(CLAIM_S * 1000)))

    def release(self) -> None:
        self._store.run(RedisStore._RELEASE, self._name, self._token)


class FsspecStore:
    """Objects of a file system that fsspec knows: s3://, gs://, memory://, ...

    Where the file system can't create a file only if it isn't there, two workers may both believe that they hold a claim: then both
    compile, and either entry is right.
    """

    is_shared = True

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(f"--compile-cache {_without_password(url)} needs the fsspec package: pip install fsspec.") from error
        self.where = _without_password(url)
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"--compile-cache {self.where}: {error}.") from error

    def get(self, key: str) -> bytes | None:
        return self._read(f"{key}.package")

    def put(self, key: str, entry: bytes) -> None:
        with self._told():
            self._files.makedirs(self._root, exist_ok=True)
        self.overwrite(f"{key}.package", entry)

    def claim(self, key: str) -> Claim | None:
        claim = _FsspecClaim(self, f"{key}.claim")
        if self.create(claim.name, claim.words()):
            return claim
        held = self._read(claim.name)
        if held is not None and time.time() < _expiry(held):
            return None
        self.remove(claim.name)  # its holder is gone
        return claim if self.create(claim.name, claim.words()) else None

    def create(self, name: str, data: bytes) -> bool:
        """False where it is there already."""
        with self._told():
            self._files.makedirs(self._root, exist_ok=True)
            try:
                self._files.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
        return True

    def overwrite(self, name: str, data: bytes) -> None:
        with self._told():
            self._files.pipe_file(self._path(name), data)

    def remove(self, name: str) -> None:
        with self._told(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _read(self, name: str) -> bytes | None:
        with self._told():
            try:
                data: bytes = self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None
        return data

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system has errors of its own
            raise StoreError(f"{self.where}: {type(error).__name__}: {error}") from error


class _FsspecClaim:
    def __init__(self, store: FsspecStore, name: str) -> None:
        self._store, self.name = store, name

    def words(self) -> bytes:
        return f"{time.time() + CLAIM_S}".encode()

    def renew(self) -> None:
        self._store.overwrite(self.name, self.words())

    def release(self) -> None:
        self._store.remove(self.name)


def _expiry(words: bytes) -> float:
    """Seconds since the epoch; of a torn claim 0."""
    try:
        return float(words)
    except ValueError:
        return 0.0


def _without_password(url: str) -> str:
    """The URL as it may stand in a log."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    _, at, host = authority.rpartition("@")
    return f"{scheme}{separator}{'***@' if at else ''}{host}{slash}{path.partition('?')[0]}"
