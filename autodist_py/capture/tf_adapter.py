"""All that capture uses of TensorFlow's private modules. It is long, as it is the one place for them."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api
from tensorflow.python.client import session as session_module
from tensorflow.python.eager import lift_to_graph, record
from tensorflow.python.eager.polymorphic_function import autograph_util, polymorphic_function
from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils, ops
from tensorflow.python.framework import func_graph as func_graph_module
from tensorflow.python.ops import (
    cond_v2,
    control_flow_util_v2,
    gradients_util,
    op_selector,
    resource_variables_toggle,
)
from tensorflow.python.ops import custom_gradient as custom_gradient_module
from tensorflow.python.ops import resource_variable_ops as variable_ops
from tensorflow.python.ops.parallel_for import control_flow_ops as parallel_for
from tensorflow.python.util import tf_decorator


class StepGraph(func_graph_module.FuncGraph):
    """The graph that a step is traced into."""

    def capture(self, tensor: Any, name: str | None = None, shape: Any = None) -> Any:
        """As TensorFlow's, which names what is made eagerly by how much the process has made before."""
        if name is None and not tf.is_symbolic_tensor(tensor):
            name = "captured"
        return super().capture(tensor, name, shape)


BaseVariable = variable_ops.BaseResourceVariable


def trace(
    function: Callable[..., Any], graph: Any, args: Sequence[Any], kwargs: dict[str, Any], *, autograph: bool
) -> None:
    """Run `function` in the StepGraph `graph`, whose placeholders `args` and `kwargs` are, as tf.function would."""
    converted = autograph_util.py_func_from_autograph(function) if autograph else function

    def without_operations(*args: Any, **kwargs: Any) -> Any:
        return returned(converted(*args, **kwargs))

    func_graph_module.func_graph_from_py_func(
        graph.name, without_operations, list(args), kwargs, func_graph=graph, create_placeholders=False
    )


def returned(result: Any) -> Any:
    """What a session returns for `result`: for an op, which runs as all do that have an effect, None."""
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.Operation) else leaf, result)


def flat_outputs(graph: Any) -> list[Any]:
    """The traced function's results, flat: tensors, and None where it returned None."""
    return func_graph_module.flatten(graph.structured_outputs)


def is_within(graph: Any) -> bool:
    """Whether ops are now made in `graph`, or in a branch, loop body or function that is being traced inside it."""
    return any(current is graph for current in _graphs_around())


def loop_or_branch(graph: Any) -> str:
    """The name of the loop or branch of TensorFlow 1's control flow in which ops are now made; "": in none."""
    around = graph._get_control_flow_context()
    return str(around.name) if around is not None else ""


def branches_around(graph: Any) -> list[Any] | None:
    """The branches of `graph` in which ops are made here, the innermost first; None: they are made elsewhere."""
    *branches, outermost = _out_of_branches(tf.compat.v1.get_default_graph())
    return branches if outermost is graph and not loop_or_branch(graph) else None


def is_gradient_of_branch(graph: Any) -> bool:
    """Whether `graph` is a branch in which TensorFlow computes the gradient of another."""
    return isinstance(graph, cond_v2._CondGradFuncGraph)


def branches_of(tensor: tf.Tensor) -> list[Any]:
    """The graph of `tensor`, and those around it as long as it is a branch."""
    return _out_of_branches(tensor.graph)


def _out_of_branches(graph: Any) -> list[Any]:
    found = [graph]
    while isinstance(found[-1], control_flow_util_v2.CondBranchFuncGraph):
        found.append(found[-1].outer_graph)
    return found


def computed_before(tensor: tf.Tensor, arguments: Sequence[tf.Tensor], on_gradient: Callable[[], None]) -> tf.Tensor:
    """`tensor` of a branch, computed anew in the graph around it, of what is there in the place of `arguments`.

    `on_gradient()` is called, and raises, where a gradient is computed through it.
    """
    branch, around = tensor.graph, tensor.graph.outer_graph
    # They are captured first, under names of their own: lifting would give them the branch's, which are counted.
    given = [around.capture(outer) for outer, inner in branch.captures if any(inner is one for one in arguments)]

    def back(*_: Any) -> None:
        on_gradient()

    with record.stop_recording(), around.as_default(), around.gradient_override_map({"Identity": _gradient_of(back)}):
        lifted = lift_to_graph.lift_to_graph([tensor], around, sources=arguments, handle_captures=True)
        result = tf.identity(lifted[tensor])
    record.record_operation("ComputedBefore", [result], given, back)
    return result


def computed_outside(tensor: tf.Tensor) -> tf.Tensor | None:
    """The value of `tensor`, which a function computes that is being traced, outside of it, in the default graph.

    None: it is computed from what the function is given, from a variable, whose value may be elsewhere, or from what a
    function around it computes.
    """
    captures = tensor.graph.captures
    closed_over = [
        inner for outer, inner in captures if not tf.is_symbolic_tensor(outer) and outer.dtype != tf.resource
    ]

    @tf.function(autograph=False)
    def compute() -> Any:
        around = tf.compat.v1.get_default_graph()
        return lift_to_graph.lift_to_graph([tensor], around, sources=closed_over, handle_captures=True)[tensor]

    try:
        value: tf.Tensor = compute.get_concrete_function()()
    except op_selector.UnliftableError:
        return None
    return value


def _gradient_of(back: Callable[..., None]) -> str:
    """The name under which `back` is the gradient of an op."""
    name = f"AutoDistGradient-{ops.uid()}"
    tf.RegisterGradient(name)(back)
    return name


def written_by(op: tf.Operation) -> list[tf.Tensor]:
    """The resources that `op` is given, and may write."""
    return list(auto_control_deps_utils.get_read_write_resource_inputs(op)[1])


@contextmanager
def branch_decisions(
    decide: Callable[[tf.Tensor, Sequence[Any]], tf.Tensor], check: Callable[[Sequence[Any]], None]
) -> Iterator[None]:
    """What a `tf.cond` is decided by is `decide(predicate, branches)`, which is asked when both have been traced.

    The branches of a `tf.switch_case` are checked by `check(branches)`.
    """
    original = cond_v2._build_cond

    def build(predicate: tf.Tensor, true_graph: Any, false_graph: Any, *args: Any, **kwargs: Any) -> Any:
        return original(decide(predicate, (true_graph, false_graph)), true_graph, false_graph, *args, **kwargs)

    original_case = cond_v2._build_case

    def build_case(index: tf.Tensor, branches: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        check(branches)
        return original_case(index, branches, *args, **kwargs)

    with patched(cond_v2, "_build_cond", build), patched(cond_v2, "_build_case", build_case):
        yield


def is_captured(graph: tf.Graph | None) -> bool:
    """Whether ops are now made in a step that is traced, or in `graph`, or inside one of them."""
    return any(current is graph or isinstance(current, StepGraph) for current in _graphs_around())


def _graphs_around() -> Iterator[Any]:
    """The graph in which ops are now made, and those around it; none where they are run eagerly."""
    current = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    while current is not None:
        yield current
        current = getattr(current, "outer_graph", None)


_SCOPE = "_autodist_scope"


@contextmanager
def scope_noted(graph: tf.Graph, scope: Any) -> Iterator[None]:
    """Within this context `current_scope` finds `scope` while ops are made in `graph`."""
    before = getattr(graph, _SCOPE, None)
    setattr(graph, _SCOPE, scope)
    try:
        yield
    finally:
        setattr(graph, _SCOPE, before)


def current_scope() -> Any:
    """What is noted of the graph in which ops are now made; None: nothing, or they are run eagerly."""
    return None if tf.executing_eagerly() else getattr(tf.compat.v1.get_default_graph(), _SCOPE, None)


def on_fetch(graph: tf.Graph, check: Callable[[str], None] | None) -> None:
    """From now on `check(name)` is called for each op of `graph` that sessions of TensorFlow's run; None: no more.

    A session asks its graph whether an op may be fetched; that answer is the graph's own, so no other graph is touched.
    """
    if check is None:
        graph.is_fetchable = partial(type(graph).is_fetchable, graph)
        return

    def is_fetchable(op: Any) -> bool:
        check(getattr(op, "op", op).name)
        return bool(type(graph).is_fetchable(graph, op))

    graph.is_fetchable = is_fetchable


@contextmanager
def callables_of(graph: tf.Graph, check: Callable[[str], None]) -> Iterator[None]:
    """`check(name)` is called for each op of `graph` of which a session makes a callable by options, as Keras does."""
    original = session_module.BaseSession._make_callable_from_options

    def make_callable(session: Any, options: Any) -> Any:
        if session.graph is graph:
            for name in (*options.target, *options.fetch):
                check(name.partition(":")[0])
        return original(session, options)

    with patched(session_module.BaseSession, "_make_callable_from_options", make_callable):
        yield


@contextmanager
def patched(owner: Any, attribute: str, replacement: Any) -> Iterator[None]:
    """`owner.attribute` is `replacement` within the context."""
    own = attribute in vars(owner)
    original = vars(owner).get(attribute)
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, attribute, original)
        else:
            delattr(owner, attribute)


Compute = Callable[[Sequence[Any]], list[Any]]


class OnGradients(Protocol):
    """What a gradient computation goes through: see `gradient_calls`."""

    def __call__(
        self, compute: Compute, sources: Sequence[Any], targets: Sequence[Any], *, is_taped: bool
    ) -> list[Any]: ...


@contextmanager
def gradient_calls(
    on_gradients: OnGradients, on_vectorized_loop: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Every gradient computation goes through `on_gradients(compute, sources, targets, is_taped=...)`.

    `compute(seeds)` returns the gradients, one for each of the flat `sources` (variables, tensors), as `on_gradients`
    does. They are those of the sum of `targets`, which are none where the user gives the targets' own gradients.
    Back-propagation begins with `seeds`, one for each of the targets; none: with TensorFlow's own, or the user's.
    A vectorized loop (of a jacobian, of `tf.vectorized_map`) is traced within `on_vectorized_loop()`.
    """
    helper = gradients_util._GradientsHelper
    tape_gradient = tf.GradientTape.gradient

    def symbolic(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> list[Any]:
        sources = list(xs) if isinstance(xs, list | tuple) else [xs]
        given = args[0] if args else kwargs.get("grad_ys")
        has_own = given is not None and any(one is not None for one in tf.nest.flatten(given))
        targets = [] if has_own else tf.nest.flatten(ys)

        def compute(seeds: Sequence[Any]) -> list[Any]:
            own, options = _seeded(seeds, args, kwargs, "grad_ys")
            return list(helper(ys, xs, *own, **options))

        return on_gradients(compute, sources, targets, is_taped=False)

    def taped(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        def compute(seeds: Sequence[Any]) -> list[Any]:
            own, options = _seeded(seeds, args, kwargs, "output_gradients")
            gradients = tape_gradient(tape, target, sources, *own, **options)
            return [gradients] if not tf.nest.is_nested(sources) else _flatten_up_to(sources, gradients)

        given = args[0] if args else kwargs.get("output_gradients")
        targets = tf.nest.flatten(target) if given is None else []
        gradients = on_gradients(compute, tf.nest.flatten(sources), targets, is_taped=True)
        return gradients[0] if not tf.nest.is_nested(sources) else tf.nest.pack_sequence_as(sources, gradients)

    vectorize = parallel_for.pfor

    def vectorized(*args: Any, **kwargs: Any) -> Any:
        with on_vectorized_loop():
            return vectorize(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patched(gradients_util, "_GradientsHelper", symbolic))
        stack.enter_context(patched(tf.GradientTape, "gradient", taped))
        stack.enter_context(patched(parallel_for, "pfor", vectorized))
        yield


def identity(tensor: tf.Tensor, on_back: Callable[[tf.Tensor], None]) -> tf.Tensor:
    """`tf.identity(tensor)`, and `on_back` is called with it whenever the back-propagation of a tape passes through it.

    That of `tf.gradients`, which finds its way in the graph and not on a tape, does not call it.
    """
    with record.stop_recording():
        passed: tf.Tensor = tf.identity(tensor)

    def back(gradient: tf.Tensor) -> list[tf.Tensor]:
        on_back(passed)
        return [gradient]

    record.record_operation("Identity", [passed], [tensor], back)
    return passed


OnCustomGradient = Callable[[Sequence[Any], Sequence[Any], Callable[..., Any]], Callable[..., Any]]


@contextmanager
def custom_gradients(on_gradient: OnCustomGradient) -> Iterator[None]:
    """The function that computes a custom gradient is `on_gradient(arguments, results, function)`, for each call.

    Likewise the one of an op for which `tf.Graph.gradient_override_map` names another than TensorFlow's.
    """
    original = custom_gradient_module._graph_mode_decorator
    of_op = ops.get_gradient_function

    def decorated(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        @wraps(function)
        def noted(*arguments: Any) -> tuple[Any, Any]:
            result, back = function(*arguments)
            replacement = on_gradient(tf.nest.flatten(arguments), tf.nest.flatten(result), back)
            return result, back if replacement is back else tf_decorator.make_decorator(back, replacement)

        return original(noted, args, kwargs)

    def gradient_function(op: Any) -> Any:
        back = of_op(op)
        if back is None or "_gradient_op_type" not in op.node_def.attr:
            return back

        @wraps(back)
        def of_this(*given: Any) -> Any:
            return back(op, *given)

        replacement = on_gradient(list(op.inputs), list(op.outputs), of_this)
        return lambda _, *given: replacement(*given)

    with ExitStack() as stack:
        stack.enter_context(patched(custom_gradient_module, "_graph_mode_decorator", decorated))
        stack.enter_context(patched(ops, "get_gradient_function", gradient_function))
        yield


def _seeded(
    seeds: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any], name: str
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments behind targets and sources with `seeds`, if there are any, in the place of the first, `name`."""
    if not seeds:
        return args, kwargs
    return ([list(seeds), *args[1:]], kwargs) if args else ((), {**kwargs, name: list(seeds)})


def _flatten_up_to(sources: Any, gradients: Any) -> list[Any]:
    return func_graph_module.nest.flatten_up_to(sources, gradients)


def is_lazy_read(variable: Any) -> bool:
    """Whether `variable` is what an assignment returns: it reads the variable when it is used, by its handle."""
    return isinstance(variable, variable_ops._UnreadVariable)


@contextmanager
def handle_uses(on_use: Callable[[Any], None]) -> Iterator[None]:
    """`on_use(variable)` is called whenever an op is made on a variable."""
    original = BaseVariable.handle

    def handle(variable: Any) -> Any:
        on_use(variable)
        return original.fget(variable)

    with patched(BaseVariable, "handle", property(handle)):
        yield


@contextmanager
def savers_built(on_build: Callable[[Any], None]) -> Iterator[None]:
    """`on_build(saver)` is called for every saver of TensorFlow 1 that adds its ops to a graph."""
    original = tf.compat.v1.train.Saver._build

    def build(saver: Any, *args: Any, **kwargs: Any) -> None:
        original(saver, *args, **kwargs)
        if saver.saver_def is not None and not tf.executing_eagerly():
            on_build(saver)

    with patched(tf.compat.v1.train.Saver, "_build", build):
        yield


@contextmanager
def resource_variables() -> Iterator[None]:
    """Variables are resource variables within, also after `tf.compat.v1.disable_v2_behavior()`."""
    was_on = resource_variables_toggle.resource_variables_enabled()
    resource_variables_toggle.enable_resource_variables()
    try:
        yield
    finally:
        if not was_on:
            resource_variables_toggle._DEFAULT_USE_RESOURCE = False


@contextmanager
def inlined_functions(graph: Any) -> Iterator[None]:
    """Calls of tf.functions inside `graph` are traced in place, through autograph, as if they were plain Python."""
    original = polymorphic_function.Function.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_within(graph):
            return original(function, *args, **kwargs)
        body = function.python_function
        if function._autograph:
            body = autograph_util.py_func_from_autograph(body, function._experimental_autograph_options)
        status = ag_ctx.Status.ENABLED if function._autograph else ag_ctx.Status.DISABLED
        with ag_ctx.ControlStatusCtx(status, options=function._experimental_autograph_options):
            if tf.compat.v1.get_default_graph().building_function:
                return body(*args, **kwargs)
            return _in_program_order(body, args, kwargs)

    with patched(polymorphic_function.Function, "__call__", call):
        yield


def _in_program_order(body: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Trace `body` into a plain graph; its results wait for all that it does, as those of a tf.function's one op do."""
    with auto_control_deps.AutomaticControlDependencies() as control:

        def result(value: Any) -> Any:
            if isinstance(value, tf.Tensor) or is_variable(value):
                return control.mark_as_return(tf.convert_to_tensor(value))
            return value

        return tf.nest.map_structure(result, body(*args, **kwargs), expand_composites=False)


def unwrap_function(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """The Python function inside a tf.function, and whether autograph converts it; a plain one is converted."""
    if isinstance(function, polymorphic_function.Function):
        return function.python_function, function._autograph
    return function, True


def is_variable(value: Any) -> bool:
    """Whether `value` is a resource variable (a Keras variable included)."""
    return variable_ops.is_resource_variable(value)


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which autograph leaves as it is, but not what asks whether to be converted: layers of Keras 2 do."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return api.autograph_artifact(wrapper)


def graph_layers(package: str) -> list[Any]:
    """The base of the layers that `package` makes in a plain graph, where that is another one."""
    return [_of_tf_keras("base_layer_v1").Layer] if package == "tf_keras" else []


def loaded_models() -> list[Any]:
    """The classes `Model` of Keras 3 and tf_keras that are loaded, with that of tf_keras's graph mode."""
    models = [sys.modules[name].Model for name in ("keras", "tf_keras") if hasattr(sys.modules.get(name), "Model")]
    return [*models, _of_tf_keras("training_v1").Model] if "tf_keras" in sys.modules else models


def _of_tf_keras(module: str) -> Any:
    """A module of tf_keras's engine, which it loads when it first makes something in a graph."""
    return importlib.import_module(f"tf_keras.src.engine.{module}")


def function_graph(op: tf.Operation, name: str) -> Any:
    """The graph of the library function `name`, which `op` calls, with its `inputs` and `outputs`; None: of none."""
    graph = op.graph
    while graph is not None:
        if (function := graph._get_function(name)) is not None:
            return getattr(function, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None
