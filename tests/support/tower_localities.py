"""What the tower API takes and gives, and what it refuses: programs that have no other to be compared with."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from autodist_py.distribute import towers
from tests.support.tower_data import numbered

PROGRAMS: dict[str, Callable[[towers.MirroredStrategy], Any]] = {}


def alone(function: Callable[[towers.MirroredStrategy], Any]) -> Callable[[towers.MirroredStrategy], Any]:
    PROGRAMS[function.__name__] = function
    return function


def found(value: Any) -> str:
    """The localities of a structure's values."""
    return " ".join(str(towers.locality_of(leaf)) for leaf in tf.nest.flatten(value))


def outcome(method: Callable[..., Any], value: Any) -> str:
    """The locality of what a method returns for a value, or that it is refused because of a locality."""
    try:
        return found(method(value))
    except ValueError as error:
        assert "locality" in str(error), error
        return "refused"


def taken(d: towers.MirroredStrategy, v: Any, own: Any, call: Callable[[Callable[..., Any], Any], Any]) -> list[str]:
    """For each method, what it gives for a T, an M, a V(v) and an N."""
    values = [own, d.reduce("sum", own), d.reduce("sum", own, v), tf.constant(2.0)]
    methods: list[Callable[[Any], Any]] = [
        lambda x: call(lambda x: x + tf.cast(towers.get_tower_context().tower_id, tf.float32), x),
        lambda x: d.broadcast(x),
        lambda x: d.broadcast(x, v),
        lambda x: d.broadcast(x, "/cpu:0"),
        lambda x: d.reduce("sum", x),
        lambda x: d.reduce("sum", x, destinations=v),
        lambda x: d.reduce("sum", x, destinations=["/cpu:0"]),
        lambda x: d.reduce("mean", x, destinations=list(d.worker_devices)),
        lambda x: d.batch_reduce("mean", [(x, v), (x, "/cpu:0")]),
        lambda x: d.update(v, lambda v, x: v.read_value() + x, x),
        lambda x: d.update_non_slot(d.non_slot_devices([v]), lambda x: x + 1.0, x),
        lambda x: d.fetch(x),
    ]
    return [", ".join(outcome(method, value) for value in values) for method in methods]


@alone
def localities(d: towers.MirroredStrategy) -> Any:
    """Eagerly, in a tf.function, and in a merge_call of one."""
    lines: list[list[str]] = []
    with d.scope():
        v = tf.Variable(1.0, name="v")

        def each() -> Any:
            return tf.cast(towers.get_tower_context().tower_id, tf.float32) + 1.0

        def outside() -> None:
            lines.append(taken(d, v, d.call_for_each_tower(each), d.call_for_each_tower))

        def merge_fn(d: Any, own: Any) -> None:
            lines.append(taken(d, v, own, d.call_for_each_tower))

        outside()
        tf.function(outside, autograph=False)()
        merging = tf.function(
            lambda: d.call_for_each_tower(lambda: towers.get_tower_context().merge_call(merge_fn, each())),
            autograph=False,
        )
        merging()
        with d.tower_local_var_scope("sum"):
            local = tf.Variable(1.0)
        kinds = [v, local, d.unwrap(v)[0], 3.0, d.worker_device_index, next(iter(d.distribute_dataset(numbered)))]
        lines.append([found(kind) for kind in kinds])
    return lines


@alone
def refusals(d: towers.MirroredStrategy) -> Any:
    """The errors of what cannot be done, in the order of REFUSED in `test_towers.py`."""
    outside = tf.Variable(1.0)
    kept: list[Any] = []
    with d.scope():
        v = tf.Variable(1.0, name="v")
        own = d.call_for_each_tower(lambda: tf.constant(1.0) * towers.get_tower_context().tower_id)
        d.call_for_each_tower(lambda: kept.append(towers.get_tower_context()))
    tried: list[Callable[[], Any]] = [
        lambda: d.reduce("sum", own),
        lambda: in_scope(lambda: d.call_for_each_tower(lambda: d.reduce("sum", own))),
        lambda: in_scope(lambda: d.reduce("max", own)),
        lambda: in_scope(lambda: d.reduce("sum", own, ["/cpu:0", "/cpu:7"])),
        lambda: in_scope(lambda: d.update(v, lambda v, x: v.assign(x), own)),
        lambda: in_scope(lambda: d.update(v, lambda v, x: v.assign(x["deep"][0]), {"deep": [own]})),
        lambda: in_scope(lambda: d.update(own, lambda v: v)),
        lambda: in_scope(lambda: d.update(outside, lambda v: v.assign(2.0))),
        lambda: in_scope(lambda: d.update(d.unwrap(v)[0], lambda v: v.assign(2.0))),
        lambda: in_scope(lambda: d.batch_reduce("sum", [(own, v), (3.0, v)])),
        lambda: in_scope(lambda: tf.function(d.call_for_each_tower)(lambda: towers.get_tower_context().device)),
        lambda: kept[0].tower_id,
        lambda: in_scope(lambda: d.call_for_each_tower(lambda x: x, own_of_three())),
        lambda: d.distribute_dataset([1, 2]),
        lambda: towers.MirroredStrategy(["/cpu:0"], num_gpus=1),
        lambda: towers.MirroredStrategy(num_gpus=64),
        lambda: in_scope(lambda: d.reduce("sum", 3.0, v)),
        lambda: in_scope(lambda: d.fetch(own)),
        lambda: in_scope(lambda: d.update_non_slot("/cpu:1", lambda: None)),
        lambda: in_scope(lambda: d.colocate_vars_with(own)),
    ]

    def in_scope(call: Callable[[], Any]) -> Any:
        with d.scope():
            return call()

    def own_of_three() -> Any:
        return type(own)((tf.constant(1.0),) * 3)

    return [str(error_of(call)) for call in tried]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@alone
def contexts(d: towers.MirroredStrategy) -> Any:
    """What is the current context, outside, in a scope, in a tower and in a merge_call; then the same in a function."""

    def now() -> list[bool]:
        tower, cross = towers.get_tower_context(), towers.get_cross_tower_context()
        is_own = towers.get_distribution_strategy() is d
        own = tower is not None and tower.distribution_strategy is d
        return [own, cross is d, is_own, towers.has_distribution_strategy(), towers.in_cross_tower_context()]

    seen: list[list[bool]] = []

    def merge_fn(given: Any) -> None:
        assert given is d
        seen.append(now())

    def tower_fn() -> None:
        seen.append(now())
        towers.get_tower_context().merge_call(merge_fn)

    def all_of_them() -> None:
        seen.append(now())
        with d.scope() as entered:
            assert entered is d
            seen.append(now())
            d.call_for_each_tower(tower_fn)

    all_of_them()
    tf.function(all_of_them, autograph=False)()
    return [sorted(map(str, {tuple(each) for each in seen})), len(seen)]


@alone
def what_is_combined(d: towers.MirroredStrategy) -> Any:
    """The numbers of gradients, and of other values, that towers combine in a function; and of values gathered."""
    seen: list[Any] = []
    gathered: list[int] = []
    placement = d.extended.placement
    builder = placement.strategy_builder

    class Recorded:
        def build(self, item: Any, resources: Any) -> Any:
            seen.append(item)
            return builder.build(item, resources)

    placement.strategy_builder = Recorded()
    with d.scope():
        v = tf.Variable([1.0, 2.0])

        def merge_fn(d: Any, slope: Any) -> None:
            d.update(v, lambda v, slope: v.assign_sub(slope), d.reduce("sum", slope, destinations=v))
            gathered.append(len(slope._gathered))

        def tower_fn() -> None:
            towers.get_tower_context().merge_call(merge_fn, v * 2.0)

        tf.function(lambda: d.call_for_each_tower(tower_fn), autograph=False)()
    placement.strategy_builder = builder
    return [(len(item.gradients), len(item.statistics)) for item in seen], gathered
