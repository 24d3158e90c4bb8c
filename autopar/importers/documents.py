"""JSON, TOML and YAML as settings by dotted names: ``{"bf16": {"enabled": true}}`` is ``bf16.enabled``. Lists stay whole."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import ConfigError
from autopar.importers.settings import Settings


class _Loader(yaml.SafeLoader):
    """YAML whose keys must differ; plain YAML takes the last of equal ones."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        _distinct([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ConfigError(f"{twice} is set twice; drop one")
    return result


def text_of(given: str | Path, argument: str, *, kind: str, mark: str) -> tuple[str, str]:
    """A name and the text of a configuration, given as a file or as its text: that has lines, or a mark of its kind in its only one.

    Raises:
        ConfigError: it is neither, or the file cannot be read.
    """
    if not isinstance(given, str | Path):
        raise ConfigError(f"{argument} is a {type(given).__name__}; give the path of a file, or its text")
    is_file = os.path.isfile(given)
    if not is_file and isinstance(given, str) and (not given.strip() or "\n" in given or mark in given):
        return argument, given.replace("\r\n", "\n")  # as a file is read
    if not is_file:
        raise ConfigError(f"{argument}={str(given)!r} is neither a file nor {kind}; give the path of a file that is there, or its text")
    path = Path(given)
    try:
        return path.name, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{argument}={str(given)!r} cannot be read as text ({error}); give the text itself") from error


def read_json(configuration: str | Path) -> Settings:
    return _read(configuration, lambda text: json.loads(text, object_pairs_hook=_distinct), "JSON", mark="{")


def read_toml(configuration: str | Path) -> Settings:
    return _read(configuration, tomllib.loads, "TOML", mark="=")


def read_yaml(configuration: str | Path) -> Settings:
    return _read(configuration, lambda text: yaml.load(text, _Loader), "YAML", mark=": ")


def _read(configuration: str | Path, parse: Callable[[str], object], kind: str, *, mark: str) -> Settings:
    name, text = text_of(configuration, "configuration", kind=kind, mark=mark)
    try:
        tree = parse(text)
        leaves = dict(_leaves(tree)) if isinstance(tree, Mapping) else {}
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deep, or a part of it holds itself; write its settings flat") from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{name} is not {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{name} holds a {type(tree).__name__}; a configuration has names and values")
    return Settings(name, leaves)


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
