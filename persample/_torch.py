"""Every private name of torch that persample uses, and nothing else: when torch renames one, this file changes.

Each name stands for a public one that torch does not have; the comment above it says what the public API lacks. The
names are torch's own, without leading underscores. ``tests/public/test_torch.py`` checks what each of them does.

Importing this file succeeds on any torch. A name that is missing is replaced by what the public API has for it, or
becomes a stand-in that raises ``TorchVersionError`` when it is called, subclassed and instantiated, or asked for an
attribute: then ``engines/fallback.py`` answers the call without it. Names of the compiler are looked up when they are
used, because importing Inductor takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import operator
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrize

from persample.errors import TorchVersionError

T = TypeVar("T")


class _Missing(type):
    """The class of stand-ins for names that the installed torch does not have, and of the classes derived from them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        raise cls._error()

    def __instancecheck__(cls, instance: object) -> NoReturn:
        raise cls._error()

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else cls._error()  # Python itself asks for the former

    def _error(cls) -> TorchVersionError:
        return TorchVersionError(cls.__mro__[-2].__name__)


replaced: list[str] = []  # names that the installed torch does not have, and that something else stands for


def private(path: str, otherwise: Any = None) -> Any:
    """Return an object of torch, or what replaces it if the installed torch has none.

    Args:
        path: "module:name", as ``pkgutil.resolve_name`` takes it.
        otherwise: what replaces it; None for a stand-in that raises an error.

    Examples:
        >>> private("torch:Tensor") is torch.Tensor
        True
        >>> private("torch._C:no_such_name")()
        Traceback (most recent call last):
        persample.errors.TorchVersionError: persample needs torch._C.no_such_name, ...
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return _replacement(path.replace(":", "."), otherwise)


def _replacement(name: str, otherwise: Any) -> Any:
    if otherwise is None:
        return _Missing(name, (), {})
    replaced.append(name)
    return otherwise


def missing(objects: Iterable[Any]) -> list[str]:
    """Return the names of the stand-ins among objects."""
    return [x.__name__ for x in objects if type(x) is _Missing]


def _unknown(*_: object) -> None:
    """Replace a reader of torch's state, which is not written back then."""


def _refuse(allowed: bool) -> None:
    """Replace what allows functions of a single level, but for forbidding them."""
    if allowed:
        _Missing("torch._C._functorch.set_single_level_autograd_function_allowed", (), {})()


def attribute(example: Any, *names: str, otherwise: Any = None) -> Any:
    """Return a function that reads private attributes of an object, or what replaces it if torch no longer has them.

    ``example`` is an object of the class, or the class itself. Of several attributes the function returns a tuple.
    """
    owner = getattr(example, "__name__", type(example).__name__)
    for name in names:
        if type(example) is _Missing or not hasattr(example, name):
            return _replacement(f"{owner}.{name}", otherwise)
    return operator.attrgetter(*names)


def _none(x: torch.Tensor) -> int:
    """Return the level of a tensor that has none; replaces what tells the levels of others, too."""
    if torch.func.debug_unwrap(x, recurse=False) is not x:
        _Missing("torch._C._functorch.maybe_get_level", (), {})()
    return -1


# --- The levels of torch.func. Its public API applies transforms, but does not tell which ones are active, nor which of
# --- them wraps a tensor, nor what is inside of the wrapper.
retrieve_all_functorch_interpreters = private("torch._functorch.pyfunctorch:retrieve_all_functorch_interpreters")
# How many levels are active: the level of the innermost.
get_dynamic_layer_stack_depth = private(
    "torch._C._functorch:get_dynamic_layer_stack_depth", lambda: len(retrieve_all_functorch_interpreters())
)
maybe_get_bdim = private("torch._C._functorch:maybe_get_bdim")  # the batch axis, if the outermost wrapper is vmap's; -1
maybe_get_level = private("torch._C._functorch:maybe_get_level", _none)  # of the outermost wrapper; -1: none, -2: ended
is_functorch_wrapped_tensor = private(  # by a level of any kind; asked fifty times a call, and in C
    "torch._C._functorch:is_functorch_wrapped_tensor", lambda x: maybe_get_level(x) != -1
)

# Public vmap and vjp take functions; these wrap single tensors, and run code below all levels.
add_batch_dim = private("torch._C._functorch:_add_batch_dim")
wrap_for_grad = private("torch._C._functorch:_wrap_for_grad")
vmap_increment_nesting = private("torch._functorch.vmap:vmap_increment_nesting")  # a level of vmap, as a context
temporarily_clear_interpreter_stack = private("torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack")

# --- The state of a thread. Public contexts restore it when they are left; after an interrupt none of them was left.
pop_dynamic_layer_stack_and_undo_to_depth = private("torch._C._functorch:pop_dynamic_layer_stack_and_undo_to_depth")
# A public autograd.Function passes through all levels, in Python; where this is allowed, one may belong to one level.
allow_single_level_autograd_function = private(
    "torch._C._functorch:set_single_level_autograd_function_allowed", _refuse
)
get_function_mode_stack = private("torch.overrides:_get_current_function_mode_stack", _unknown)
get_dispatch_mode_stack = private("torch.utils._python_dispatch:_get_current_dispatch_mode_stack")
dispatch_mode_state = private("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", _unknown)
push_dispatch_mode = private("torch.utils._python_dispatch:_push_mode")
pop_dispatch_mode = private("torch.utils._python_dispatch:_pop_mode")
set_grad_enabled = private("torch._C:_set_grad_enabled", torch.set_grad_enabled)  # C, which no signal interrupts
set_fwd_grad_enabled = private("torch._C:_set_fwd_grad_enabled", _unknown)
top_saved_tensors_hooks: Any = functools.partial(  # of this thread, while no tracer runs; None if there are none
    private("torch._C._autograd:_top_saved_tensors_default_hooks", lambda _: None), True
)

_dispatch = private("torch.utils._python_dispatch")
_transforms = private("torch._functorch.eager_transforms")
_forward_level = attribute(forward_ad, "_current_level")
_jvp_nesting = attribute(_transforms, "JVP_NESTING", otherwise=lambda _: 0)
# Variables of the module, which say whether modes are active, for all threads.
_MODE_FLAGS = [name for name, x in vars(_dispatch).items() if name.startswith("_") and isinstance(x, bool)]


def dispatch_flags() -> tuple[bool, ...]:
    """Return whether dispatch modes are active, as torch keeps it once for all threads."""
    return tuple(map(vars(_dispatch).__getitem__, _MODE_FLAGS))


def set_dispatch_flags(flags: tuple[bool, ...]) -> None:
    """Set what ``dispatch_flags`` returns."""
    for name, is_active in zip(_MODE_FLAGS, flags, strict=True):
        setattr(_dispatch, name, is_active)
    with TorchDispatchMode():  # which leaves a copy of the last one in C
        pass


def forward_levels() -> tuple[int, int]:
    """Return the level of ``torch.autograd.forward_ad`` (−1: none), and how many levels of ``jvp`` are active."""
    return _forward_level(forward_ad), _jvp_nesting(_transforms)


def set_jvp_nesting(levels: int) -> None:
    """Set how many levels of ``jvp`` torch takes to be active, once for all threads."""
    _transforms.JVP_NESTING = levels


def transforms() -> list[str]:
    """Return the names of the active ``torch.func`` transforms, outermost first: "vmap", "grad", "jvp", …."""
    if not get_dynamic_layer_stack_depth():  # the common case; the list takes longer
        return []
    return [level.key().name.lower() for level in retrieve_all_functorch_interpreters()]


def is_forward_mode() -> bool:
    """Return whether ``torch.autograd.forward_ad`` is active, entered by other callers than ``torch.func.jvp``.

    torch counts both kinds of levels once for all threads, so that a level of ``jvp`` may belong to another thread.
    """
    level, nesting = forward_levels()
    return level >= 0 and not nesting


engine_run_backward = private(  # torch.autograd.grad, but under modes
    "torch.autograd.graph:_engine_run_backward",
    lambda *args, **kwargs: torch.autograd.Variable._execution_engine.run_backward(*args, **kwargs),  # noqa: PLW0108
)


def run_by(engine: Callable[..., Any], function: Any) -> Any:
    """Return torch.autograd.grad or backward with another engine: they run torch's own outside of modes."""
    names = {**function.__globals__, "_engine_run_backward": engine}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def saved_by(node: Any) -> Callable[[str], Any]:
    """Return what a node of an autograd graph has saved, by the name of the argument of its function."""
    return lambda name: getattr(node, f"_saved_{name}")


# Methods and attributes that read a tensor's memory or views.
private_reads = "_base", "_version", "_backward_hooks", "_is_view", "_typed_storage"

# --- Modes and fake tensors, whose public users are torch.compile and torch.export.
disable_current_modes = private("torch.utils._python_dispatch:_disable_current_modes")  # a context
# Public autograd replays writes into views by strides only; this context replays the views themselves.
force_original_view_tracking = private("torch.autograd.grad_mode:_force_original_view_tracking")


if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import TreeSpec as TreeSpec

    SingleLevelFunction = torch.autograd.Function
else:
    OpOverload = type(torch.ops.aten.add.Tensor)
    FakeTensor = private("torch._subclasses.fake_tensor:FakeTensor")
    FakeTensorMode = private("torch._subclasses.fake_tensor:FakeTensorMode")
    SingleLevelFunction = private("torch.autograd.function:_SingleLevelFunction")
    TorchDispatchMode = private("torch.utils._python_dispatch:TorchDispatchMode")
    TreeSpec = object  # of annotations
fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")  # prints their errors, which are raised anyway
inductor_log = logging.getLogger("torch._inductor.ir")  # names each operation that compiled C++ calls through Python


# One operation for many tensors.
foreach_div_ = private("torch:_foreach_div_", lambda values, divisor: [x.div_(divisor) for x in values])


# --- Attributes of tensors, operators and modules.
version = attribute(torch.Tensor, "_version")  # how often a tensor was written into
view_base = attribute(torch.Tensor, "_base")  # the tensor that another one is a view of, or None
backward_hooks = attribute(torch.Tensor, "_backward_hooks")
post_accumulate_grad_hooks = attribute(torch.Tensor, "_post_accumulate_grad_hooks")
is_zerotensor = private("torch:Tensor._is_zerotensor", torch.is_complex)  # perhaps a tensor of zeros without memory
storage_id = attribute(torch.UntypedStorage, "_cdata")  # as data_ptr, of storages without memory too
node_outputs = attribute(torch.autograd.graph.Node, "_input_metadata")  # shapes and dtypes of a node's results
schema = attribute(torch.ops.aten.add.Tensor, "_schema")  # an operator's arguments, and which of them it writes
parameter_slots = attribute(nn.Module(), "_parameters")  # a module's own parameters, the dict that it reads
buffer_slots = attribute(nn.Module(), "_buffers")
forward_hooks = attribute(nn.Module(), "_forward_pre_hooks", "_forward_hooks")  # in order: the public API adds only
module_slots = attribute(nn.Module(), "_modules")  # its parts, without the generators around them


OF_TENSORDICTS = "_param_td"  # the attribute that only ``TensorDictParams`` have


def tensordict_slots(module: Any) -> list[dict[str, Any]]:
    """Return the dicts in which a ``TensorDictParams`` keeps its tensors beside those of modules; [] of other modules.

    Tensordict is no dependency; it has no public way to replace a tensor of a locked TensorDict.
    """
    dicts = [held] if (held := getattr(vars(module).get(OF_TENSORDICTS), "_tensordict", None)) else []
    for slots in dicts:  # which grows
        dicts += [nested for x in slots.values() if (nested := getattr(x, "_tensordict", None))]
    return dicts


num_parametrize_caches = attribute(parametrize, "_cache_enabled")  # the contexts in which values are kept


def flat_weights(layer: nn.RNNBase) -> tuple[list[Any], list[Any]]:
    """Return the second list of weights that ``nn.GRU`` and its like keep, and that of references to them."""
    return list(layer._flat_weights), list(layer._flat_weight_refs)


def set_flat_weights(layer: nn.RNNBase, weights: tuple[list[Any], list[Any]]) -> None:
    """Set what ``flat_weights`` returned. The layer's own method also moves the weights into one block of cuDNN's."""
    layer._flat_weights, layer._flat_weight_refs = weights


# --- Functions and operators that public functions call. Rules replace them, or call them without their callers.
weight_norm = private("torch:_weight_norm")
nested_tensor_from_mask_left_aligned = private("torch:_nested_tensor_from_mask_left_aligned")
pack_padded_sequence = private("torch:_pack_padded_sequence")
pad_packed_sequence = private("torch:_pad_packed_sequence")
pad_sequence = private("torch._C._nn:pad_sequence")
cudnn_rnn_flatten_weight = private("torch:_cudnn_rnn_flatten_weight")  # moves the weights of nn.GRU into one block
make_dual = private("torch:_VF._make_dual")
aten_attention_math = private("torch:ops.aten._scaled_dot_product_attention_math")
aten_attention_cpu = private("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu")
aten_attention_cpu_backward = private("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")
aten_efficientzerotensor = private("torch:ops.aten._efficientzerotensor.default")  # zeros without memory
aten_unsafe_view = private("torch:ops.aten._unsafe_view.default")
aten_unsafe_index_put = private("torch:ops.aten._unsafe_index_put.default")


@functools.cache
def multi_head_attention_by(attention: Callable[..., torch.Tensor]) -> Any:
    """Return ``F.multi_head_attention_forward`` with another attention in it; a mode that answers it sees none."""
    function = F.multi_head_attention_forward
    names = {"scaled_dot_product_attention": attention, "has_torch_function": lambda _: False}
    return FunctionType(function.__code__, {**vars(F), **names}, argdefs=function.__defaults__)


# --- Pytrees: torch.func takes those that are registered here; torch 2.13 has no public module of them.
tree_flatten_with_path = private("torch.utils._pytree:tree_flatten_with_path")
tree_flatten = private("torch.utils._pytree:tree_flatten", lambda *args: _without_paths(*tree_flatten_with_path(*args)))


def _without_paths(leaves: Sequence[tuple[Any, Any]], structure: TreeSpec) -> tuple[list[Any], TreeSpec]:
    return [leaf for _, leaf in leaves], structure


# --- The compiler, which torch.compile alone makes public.
TensorGuards = private("torch._C._dynamo.guards:TensorGuards")  # compares dtypes, shapes, strides, devices in C
# Functions in the graphs of Dynamo that open and close the levels of inner transforms, and those that take a level.
OPENS_LEVEL = frozenset({"_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting"})
CLOSES_LEVEL = frozenset({"_vmap_decrement_nesting", "_grad_decrement_nesting", "_jvp_decrement_nesting"})
scan = private("torch.ops:higher_order.scan")  # a loop in the graphs of make_fx, which Inductor compiles as a loop
cond = private("torch.ops:higher_order.cond")  # a branch in them, which torch.cond would capture by Dynamo
GET_DATA = "_get_data_attr"  # what reads ``.data`` in the graphs of Dynamo
SETS_MODE = frozenset(  # functions in the graphs of Dynamo after which operations compute something else
    {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode"}
)
LEVEL_ARGUMENT = {"_add_batch_dim": 2, "_remove_batch_dim": 1, "_wrap_for_grad": 1, "_unwrap_for_grad": 1}


_LOGS = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log")  # methods that write a log
_CAPTURE_SETTINGS: dict[str, Any] = {
    "allow_rnn": True,
    "trace_autograd_ops": True,
    "ignore_logging_functions": {warnings.warn, print},
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,  # two parameters may become one
    "record_runtime_overhead": False,  # at every call, for the profiler
    "automatic_dynamic_shapes": True,
    "specialize_float": False,
    "allow_unspec_int_on_nn_module": True,  # a module may count its calls
    "recompile_limit": 128,  # of one loss: beyond capture.MOST_CAPTURES, after which the engine is eager
}
# Functions that register something, and fail when they are called again after an interrupt.
DONE_ONCE = frozenset({"lazy_init", "lazy_load_decompositions"})


@functools.cache
def load_decompositions() -> None:
    """Have torch load its decompositions for vmap, as its first vmap in a process does."""
    with disable_current_modes():
        torch.vmap(torch.neg)(torch.zeros(1, device="cpu"))


get_eval_frame_callback = private("torch._C._dynamo.eval_frame:get_eval_frame_callback")  # who sees Python's frames
frame_callback_state = private("torch._C._dynamo.eval_frame:get_eval_frame_callback", _unknown)
set_eval_frame = private("torch._C._dynamo.eval_frame:set_eval_frame")
_frame_actions = private("torch._C._dynamo.eval_frame:_FrameAction", SimpleNamespace(SKIP=None))
_frame_strategy = private("torch._C._dynamo.eval_frame:_FrameExecStrategy", _unknown)
_set_frame_strategy = private("torch._C._dynamo.eval_frame:set_code_exec_strategy", _unknown)


def uncaptured(function: T) -> T:
    """Mark a function as ``torch.compiler.disable`` does, without importing Dynamo: compiled callers break there."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = _frame_actions.SKIP
    strategy = None if skip is None else _frame_strategy(skip, skip)
    if strategy is not None:
        _set_frame_strategy(function.__code__, strategy)  # type: ignore[attr-defined]
    return function


def capture_settings(*, numbers_are_constants: bool = False) -> Any:
    """Return a context in which Dynamo captures recurrent layers, passes prints and logs over, and guards hooks.

    With ``numbers_are_constants``, numbers and sizes that have changed are constants, too, rather than inputs.
    """
    numbers = {"automatic_dynamic_shapes": False, "specialize_float": True} if numbers_are_constants else {}
    logs = {x for name, x in vars(logging.Logger).items() if name.startswith(_LOGS)}  # libraries add to them
    ignored = {"ignore_logging_functions": _CAPTURE_SETTINGS["ignore_logging_functions"] | logs}
    return private("torch._dynamo.config").patch({**_CAPTURE_SETTINGS, **numbers, **ignored})


def dynamo_settings() -> dict[str, Any]:
    """Return the settings that ``capture_settings`` changes, or nothing before Dynamo is imported."""
    config = sys.modules.get("torch._dynamo.config")
    return {} if config is None else {name: getattr(config, name) for name in _CAPTURE_SETTINGS}


def set_dynamo_settings(settings: dict[str, Any]) -> None:
    """Set what ``dynamo_settings`` returns."""
    for name, value in settings.items():
        setattr(sys.modules["torch._dynamo.config"], name, value)


def import_dynamo() -> None:
    """Import Dynamo, as ``torch.func.grad`` does, before ``torch.compile`` imports Inductor.

    The two import each other: threads that begin with one each would wait for each other's half.
    """
    importlib.import_module("torch._dynamo")


# The context of a compilation: without it, a trace forbids all threads to call compiled functions.
compiling: Any = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)


@functools.cache
def compile_lock() -> Any:
    """Return the lock under which ``torch.compile`` traces, and replaces the filters of warnings of all threads."""
    import_dynamo()
    module, own = private("torch._dynamo.convert_frame"), threading.RLock()
    return attribute(module, "compile_lock", otherwise=lambda _: own)(module)


# The modules of ``functional_call`` in the names of guards; they hold no state.
_FUNCTIONAL_CALL = (
    "G['__import_torch_dot__functorch_dot_functional_call']",
    "G['__import_torch_dot_nn_dot_utils_dot_stateless']",
    "G['__import_torch_dot_nn_dot_utils_dot__named_member_accessor']",
)


def guards_to_compare(guards: Sequence[Any]) -> list[bool]:
    """Return which guards each call compares: not those of the functions that ``functional_call`` consists of.

    A patch of these is not seen. With a filter, torch makes the guards twice, and asserts that their objects are the
    same; of NumPy arrays it makes a new tensor each time, so the first ones are dropped.
    """
    for guard in guards:
        guard.orig_guard.obj_weakref = None
    return [not guard.name.startswith(_FUNCTIONAL_CALL) for guard in guards]


def tensors_read(guards: Sequence[Any]) -> str:
    """Return an expression of the tensors that guards compare: no trained parameters, and only the first argument."""
    read = [guard for guard in guards if guard.guard_type == "TENSOR_MATCH" and not guard.value.requires_grad]
    names = [guard.name for guard in read if "___from_numpy(" not in guard.name]  # an array is no nested tensor
    names = [name for name in names if name.startswith("args[0]") or not name.startswith("args[")]
    return "".join(f"{name}, " for name in sorted(names))


def run_captured(function: Callable[..., Any]) -> Any:
    """Return a function that runs what ``torch.compile`` captured of another one, and the other one where nothing fits.

    ``torch.compile`` itself would capture it once more. ``torch._dynamo.run`` does the same, with 20 checks each time.
    """

    def run(*args: Any) -> Any:
        before = get_eval_frame_callback()
        try:
            set_eval_frame(False)
            return function(*args)
        finally:
            set_eval_frame(before)

    return run


def context_of_a_capture() -> Context:
    """Return a copy of the context, in which Dynamo has marked nothing.

    Since torch 2.15, Dynamo marks what it is converting in a set of a context variable. An interrupt may leave a mark,
    by which Dynamo refuses the value from then on. Copies of a context share the set.
    """
    context = copy_context()
    for variable in context:
        if variable.name == "_vt_active_calls":
            context.run(variable.set, None)
    return context


def forget_captured(code: CodeType) -> None:
    """Drop what Dynamo captured of a code object; torch keeps every code object that it captured."""
    private("torch._C._dynamo.eval_frame:reset_code")(code)


def is_number_input(node: torch.fx.Node) -> bool:
    """Return whether a placeholder of Dynamo stands for a number of Python; a float is passed as a 0-d tensor."""
    argument = node.meta.get("grapharg")
    return argument is not None and not attribute(argument, "is_tensor")(argument)


def source_of(node: torch.fx.Node) -> str | None:
    """Return the expression of what a placeholder of Dynamo stands for, as L['args'][0].size()[0]; None if unknown."""
    argument = node.meta.get("grapharg")
    source = None if argument is None else attribute(argument, "source")(argument)
    return None if source is None else attribute(source, "name")(source)


def recompile_reason() -> str:
    """Return the guard that failed, in a backend that Dynamo calls once more for the same code; otherwise ""."""
    metrics = private("torch._dynamo.utils:get_metrics_context")()
    return attribute(metrics, "_metrics")(metrics).get("recompile_reason") or ""


enable_python_dispatcher = private("torch._dispatch.python:enable_python_dispatcher")  # as make_fx does for symbols


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions of aten operations."""
    with warnings.catch_warnings():  # of modules of torch, as they are imported
        warnings.simplefilter("ignore")
        private("torch._inductor.compile_fx:compile_fx_inner")  # whose import registers those of pooling
    return private("torch._inductor.decomposition:select_decomp_table")()


def _may_use_vectors() -> bool | None:
    """Return True where torch's own kernels use the processor's vector instructions, else None: Inductor tries them.

    Its trial compiles and loads a file for each kind of instructions: 7 s with an empty cache, 1 s in each process.
    """
    return None if torch.backends.cpu.get_cpu_capability() in {"DEFAULT", "NO AVX"} else True


# The fewest numbers of a loop for each of its threads: torch's own 512 take less time than waiting for a thread.
_LEAST_PER_THREAD = 1024
_LARGE_GRAPH = 1000  # nodes; a transformer of two layers has 1,200


def compile_graph(
    graph: Any, mode: FakeTensorMode, inputs: Sequence[Any], *, prefers_channels_last: bool, calls_in_cpp: bool
) -> Any:
    """Compile a functional graph of aten operations by Inductor, without the guards of ``torch.compile``.

    ``inputs`` are fake tensors like those that the code will be called with, of a mode with a ``ShapeEnv``.
    Convolutions may be laid out with ``prefers_channels_last`` where Inductor would. With ``calls_in_cpp`` the code
    that calls the kernels is C++, too. Returns a function from a list of tensors, which it empties, to the outputs.
    """
    config, guards = private("torch._inductor.config"), private("torch._guards")
    settings = {
        **({} if prefers_channels_last else {"layout_optimization": False}),
        "cpp_wrapper": calls_in_cpp,
        # The code that calls the kernels is compiled apart, for size: half the time of a large graph. A small one would
        # wait for a second precompiled header.
        "cpp_wrapper_build_separate": len(graph.graph.nodes) > _LARGE_GRAPH,
        "cpp.min_chunk_size": max(config.cpp.min_chunk_size, _LEAST_PER_THREAD),
        "cpp.vec_isa_ok": _may_use_vectors() if config.cpp.vec_isa_ok is None else config.cpp.vec_isa_ok,
        # The key of Inductor's cache on disk has their bodies, so programs with them can be cached.
        "unsafe_marked_cacheable_functions": {f"{x.__module__}.{x.__name__}": "body in key" for x in (scan, cond)},
    }
    if torch.__version__ < "2.14":  # which has two faults less
        settings |= {"_pre_fusion_custom_pass": _after_writes(), "_post_fusion_custom_pass": _without_shared_buffers()}
    tracing = guards.tracing(guards.TracingContext(mode))  # Inductor's cache on disk asks it for the symbolic sizes
    with private("torch._inductor.virtualized:V").set_fake_mode(mode), tracing, config.patch(settings):
        private("torch._inductor.fx_passes.joint_graph:joint_graph_passes")(graph)
        compiler = private("torch._inductor.compile_fx:compile_fx_inner")
        code = compiler(graph, list(inputs), is_inference=True, cpp_wrapper=calls_in_cpp)
    return code.current_callable  # a call of ``code`` itself looks for tools of torch's developers each time


@functools.cache
def _after_writes() -> Any:
    """Return a pass of Inductor's scheduler that keeps what reads a buffer after the writes into it.

    Where the scheduler changes the loops of a reader to fuse it, it forgets the order, unless the reader has a
    dependency that no index shows. Wrong in torch 2.13, mended in 2.14:
    https://github.com/pytorch/pytorch/issues/185509.
    """
    dependency = private("torch._inductor.dependencies:WeakDep")

    def ordered(node: Any) -> Any:
        for name in {x.name for x in node.read_writes.reads} & {*node.mutation_renames.values()}:
            node.add_fake_dep(dependency(name, mutating_buf=""))
        return node

    return _scheduler_pass(_after_writes, ordered)


@functools.cache
def _without_shared_buffers() -> Any:
    """Return a pass of Inductor's scheduler, after which fused loops never share a buffer of one step among several.

    On a CPU, fused loops over the same steps hand values on in a buffer of one step. Where vectors run along the steps,
    several of them use that buffer at once. Wrong in torch 2.13, mended in 2.14:
    https://github.com/pytorch/pytorch/issues/185702.
    """
    fused = private("torch._inductor.codegen.cpp:OuterLoopFusedSchedulerNode")

    class Checked(fused):  # type: ignore[misc, valid-type]
        def check_outer_fusion_loop_level_attr(self, kernels: list[Any], depth: int) -> bool:
            """Return whether the loops can be fused; if not, each is compiled alone, and buffers hold all steps."""
            if private("torch._inductor.virtualized:V").local_buffer_context.local_buffers and any(
                loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth]
            ):
                return False
            return bool(super().check_outer_fusion_loop_level_attr(kernels, depth))

    def checked(node: Any) -> Any:
        if type(node) is not fused:
            return node
        new = Checked(node.scheduler, node.get_outer_nodes(), node.outer_loop_fusion_depth)
        node.scheduler.name_to_fused_node.update({loop.get_name(): new for loop in new.get_nodes()})
        return new

    return _scheduler_pass(_without_shared_buffers, checked)


def _scheduler_pass(make: Callable[[], Any], change: Callable[[Any], Any]) -> Any:
    """Return a pass of Inductor's scheduler that changes or replaces each node, and that ``make`` makes again."""
    passes = private("torch._inductor.custom_graph_pass")

    class Pass(passes.CustomSchedulerPass):  # type: ignore[misc, name-defined]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return [change(node) for node in nodes]

        def uuid(self) -> Any:  # in the key of Inductor's cache on disk
            return Path(__file__).read_bytes()

        def __reduce__(self) -> tuple[Any, ...]:  # the key has the settings, too
            return make, ()

    return Pass()


def keep_kernel(node: torch.fx.Node) -> None:
    """Make Inductor call torch's kernel for an operation, without its own lowering, which may fix symbolic sizes."""
    node.meta["should_fallback"] = True


def functionalize(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without in-place writes, but for one into each written input at the end.

    ``torch.func.functionalize`` does the same, but turns the views in loops into copies.
    """

    def with_inputs(*inputs: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, ...]]:
        return function(*inputs), inputs

    def pure(*inputs: torch.Tensor) -> Any:
        results, after = private("torch._subclasses.functional_tensor:dispatch_functionalize")(with_inputs)(*inputs)
        for x, written in zip(inputs, after, strict=True):
            if written is not x:
                x.copy_(written)
        return results

    return pure


def keep_strides(x: torch.Tensor) -> torch.Tensor:
    """Return a traced tensor as it lies in memory; Inductor may change the layout of any other."""
    return private("torch._inductor.inductor_prims:force_stride_order")(x, x.stride())


def symbolic_size(mode: FakeTensorMode, size: int) -> Any:
    """Return a symbol for a size of inputs, such as ``size``, which the ``ShapeEnv`` of their mode keeps."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext  # half a second

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return mode.from_tensor(torch.empty(size, device="cpu"), symbolic_context=context).shape[0]
