"""Plug-ins: classes that a text names, built in, registered by an installed package, or `module:Name`."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from autodist_py.proto.calls import construct
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.text import known_names


@dataclass(frozen=True, slots=True)
class Registry:
    """The plug-ins of one kind.

    Attributes:
        noun: what one is called, such as "compressor".
        group: the entry points under which packages register theirs.
        built_in: name -> `module:Name`, of ours; they work uninstalled, too.
    """

    noun: str
    group: str
    built_in: Mapping[str, str]

    def locations(self) -> dict[str, str]:
        """Name -> `module:Name` of each one that can be named without its module, by name.

        Raises:
            StrategyError: two installed packages register one name for different classes.
        """
        locations = dict(self.built_in)
        for entry_point in entry_points(group=self.group):
            known = locations.setdefault(entry_point.name, entry_point.value)
            self._require_one(entry_point.name, tuple(dict.fromkeys((known, entry_point.value))))
        return dict(sorted(locations.items()))

    def find(self, name: str) -> Any:
        """The class, or other callable, of that name; its module is imported.

        Raises:
            StrategyError: there is none; the error lists what exists.
        """
        if ":" in name:
            return self._imported(name)
        own = [self.built_in[name]] if name in self.built_in else []
        registered = dict.fromkeys([*own, *(one.value for one in entry_points(group=self.group) if one.name == name)])
        if not registered:
            locations = self.locations()
            raise StrategyError(
                f"no {self.noun} is called {name!r}; {known_names(name, locations, limit=len(locations))} "
                f"(one that is not registered is written module:Name)"
            )
        self._require_one(name, tuple(registered))
        return self._imported(next(iter(registered)))

    def _require_one(self, name: str, locations: Sequence[str]) -> None:
        if len(locations) > 1:
            raise StrategyError(
                f"a {self.noun}'s name stands for one {self.noun}; {name!r} is registered for {locations[0]!r} and "
                f"{locations[1]!r}; uninstall one of the packages"
            )

    def make(self, name: str, arguments: Mapping[str, object], require: Callable[[Any, str], None]) -> Any:
        """What the plug-in of that name makes of the arguments; `require` refuses what is no plug-in uncalled.

        Raises:
            StrategyError: there is no such plug-in or parameter, or it does not accept the arguments.
        """
        factory = self.find(name)
        require(factory, name)
        return construct(factory, name, arguments, self.noun)

    def name_of(self, kind: type) -> str:
        """How a text names the class: by the name that is built in or registered for it, else as `module:Name`.

        Raises:
            StrategyError: no text can name it, as it does not stand at the top of its module.
        """
        own = f"{kind.__module__}:{kind.__qualname__}"
        for name, location in self.built_in.items():  # Packages may register it, too, and have no say in its name.
            if location == own:
                return name
        locations = self.locations()
        for name, location in locations.items():
            if location == own:
                return name
        for name, location in locations.items():  # A module may pass on what another one has.
            if name not in self.built_in and self._imported(location) is kind:
                return name
        if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
            raise StrategyError(
                f"a {self.noun} is a class at the top of a module, so that every worker finds it by its name; got "
                f"{own}. Move it there"
            )
        return own

    def require_registered(self, name: str, what: str) -> None:
        """Refuse `module:Name`: a file, or a message, may name only what is built in or a package registered.

        Raises:
            StrategyError: the name has a module; it would be imported, and run.
        """
        if ":" in name:
            raise StrategyError(
                f"{what} is read from a file, which names a {self.noun} that is built in, or that an installed package "
                f"has registered under the entry points {self.group}; got {name!r}. Register it, or give it to a "
                "strategy builder in your own code"
            )

    def _imported(self, location: str) -> Any:
        module_name, _, attribute = location.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # Whatever somebody's module raises.
            raise StrategyError(f"{self.noun} {location!r} cannot be imported: {error}") from error
        if not hasattr(module, attribute):
            public = [name for name, one in vars(module).items() if isinstance(one, type) and not name.startswith("_")]
            raise StrategyError(f"module {module_name!r} has no {attribute!r}; {known_names(attribute, public)}")
        return getattr(module, attribute)
