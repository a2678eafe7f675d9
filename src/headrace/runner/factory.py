"""Makes the runner that a config asks for."""

from __future__ import annotations

from importlib import import_module

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.runner.interface import GrammarSource, Runner


def make_runner(config: EngineConfig, grammars: GrammarSource | None = None) -> Runner:
    """The runner of `config`: the one its `runner_factory` ("package.module:function") returns, else a `ModelRunner`, which gets `grammars`.

    Raises `ConfigError` where the factory can't be found, and what the runner's own start raises (`StartError`s).
    """
    if config.runner_factory is None:
        from headrace.runner.model_runner import ModelRunner  # imports torch: not for engines with another runner

        return ModelRunner(config, grammars)
    module_name, separator, function_name = config.runner_factory.partition(":")
    if not separator or not module_name or not function_name:
        raise ConfigError(f"--runner-factory must read package.module:function, not {config.runner_factory!r}.")
    try:
        factory = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--runner-factory {config.runner_factory} can't be loaded: {error}.") from error
    runner: Runner = factory(config)
    return runner
