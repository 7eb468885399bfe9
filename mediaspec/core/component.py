"""Base of components that are saved as one JSON file: acceptance rules and everything else that is pure configuration.

With diffusers installed the classes are diffusers' own, so a pipeline folder holds such a component like a scheduler.
Without it a small local equivalent reads and writes the very same file (`scheduler_config.json`).
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["HAS_DIFFUSERS", "ConfigMixin", "SchedulerMixin", "register_to_config"]

CONFIG_NAME = "scheduler_config.json"
_Init = TypeVar("_Init", bound=Callable[..., None])
_Self = TypeVar("_Self", bound="_LocalConfigMixin")


class _FrozenConfig(dict[str, Any]):
    """A read-only dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no setting named {name!r}; there are {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a component's config is read-only; build a new component with the changed setting")

    __setitem__ = __delitem__ = _refuse
    update = pop = setdefault = popitem = clear = _refuse


class _LocalConfigMixin:
    """Keeps the constructor's arguments as `config` and moves them to and from JSON."""

    config_name: str = CONFIG_NAME
    has_compatibles: bool = False
    _internal_dict: _FrozenConfig

    def register_to_config(self, **settings: Any) -> None:
        previous = dict(getattr(self, "_internal_dict", {}))
        self._internal_dict = _FrozenConfig({**previous, **settings})

    @property
    def config(self) -> _FrozenConfig:
        return self._internal_dict

    def to_json_string(self) -> str:
        content = {"_class_name": type(self).__name__, **self._internal_dict}
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    def save_config(self, save_directory: str | os.PathLike[str]) -> None:
        folder = Path(save_directory)
        if folder.is_file():
            raise ValueError(f"save to a folder; {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.config_name).write_text(self.to_json_string(), encoding="utf-8")

    @classmethod
    def load_config(cls, path: str | os.PathLike[str], subfolder: str | None = None) -> dict[str, Any]:
        folder = Path(path) / subfolder if subfolder else Path(path)
        file = folder if folder.is_file() else folder / cls.config_name
        if not file.is_file():
            raise OSError(f"no {cls.config_name} in {folder}; to load from a hub install diffusers")
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content

    @classmethod
    def from_config(cls: type[_Self], config: Mapping[str, Any], **overrides: Any) -> _Self:
        settings = {key: value for key, value in config.items() if not key.startswith("_")}
        return cls(**{**settings, **overrides})

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"


class _LocalSchedulerMixin:
    """`save_pretrained` and `from_pretrained` for local folders."""

    config_name: str = CONFIG_NAME

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        assert isinstance(self, _LocalConfigMixin)
        self.save_config(save_directory)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], subfolder: str | None = None, **overrides: Any) -> Any:
        assert issubclass(cls, _LocalConfigMixin)
        return cls.from_config(cls.load_config(path, subfolder), **overrides)


def _local_register_to_config(init: _Init) -> _Init:
    """Decorates `__init__`: every argument, given or default, is kept in `config` before the body runs."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def registered(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *names = signature.parameters
        self.register_to_config(**{name: bound.arguments[name] for name in names})
        init(self, *args, **kwargs)

    return registered  # type: ignore[return-value]


if TYPE_CHECKING:
    ConfigMixin = _LocalConfigMixin
    SchedulerMixin = _LocalSchedulerMixin
    register_to_config = _local_register_to_config
    HAS_DIFFUSERS: bool
else:
    try:  # two submodules only: `import diffusers` is lazy, its model and pipeline modules stay unloaded
        from diffusers.configuration_utils import ConfigMixin, register_to_config
        from diffusers.schedulers.scheduling_utils import SchedulerMixin

        HAS_DIFFUSERS = True
    except ImportError:
        ConfigMixin, SchedulerMixin = _LocalConfigMixin, _LocalSchedulerMixin
        register_to_config = _local_register_to_config
        HAS_DIFFUSERS = False
