"""JSON, TOML and YAML files as settings by dotted names: ``{"bf16": {"enabled": true}}`` is ``bf16.enabled``. Lists stay whole."""

from __future__ import annotations

import json
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


def read_json(path: str | Path) -> Settings:
    return _read(path, lambda text: json.loads(text, object_pairs_hook=_distinct), "JSON")


def read_toml(path: str | Path) -> Settings:
    return _read(path, tomllib.loads, "TOML")


def read_yaml(path: str | Path) -> Settings:
    return _read(path, lambda text: yaml.load(text, _Loader), "YAML")


def _read(path: str | Path, parse: Callable[[str], object], kind: str) -> Settings:
    path = Path(path)
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path.name} is not {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path.name} holds a {type(tree).__name__}; a configuration has names and values")
    return Settings(path.name, dict(_leaves(tree)))


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
