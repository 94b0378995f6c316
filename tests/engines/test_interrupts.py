"""Signals at random moments, as Ctrl-C in a notebook: modules, torch's state and later results are as they were."""

from __future__ import annotations

import contextvars
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad
from torch.nn import functional as F
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree

import persample
from persample import ClippedMean, LossError, Norm, Stack, _torch, clear_cache, composite_grads, per_sample_grads
from persample.engines.compiled import batchable
from persample.utils import isolation

# A signal that comes while torch collects a generator or calls back from C is printed, not raised.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Interrupted(BaseException):
    """Raised by the signal, as KeyboardInterrupt is by Ctrl-C."""


def interrupt(*_):
    raise Interrupted


@pytest.fixture(autouse=True)
def alarm():
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


class Layers(nn.Module):
    """Layers alone."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        return self.body(x).sum()


class Everything(Layers):
    """Buffers, recurrent layers, attention, and derivatives inside of the loss."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8).eval()
        self.rnn = nn.GRU(8, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        self.hidden = self.norm(self.body(x)[None])
        h = self.rnn(self.hidden)[0]
        return F.scaled_dot_product_attention(h[None], h[None], h[None]).sum() + grad(torch.sum)(h).sum()


def state():
    functorch, cuda = torch._C._functorch, torch.backends.cuda
    return {
        "transforms": functorch.get_dynamic_layer_stack_depth(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch flags": (
            _python_dispatch._is_in_torch_dispatch_mode,
            _python_dispatch._is_in_non_infra_torch_dispatch_mode,
            _python_dispatch._is_in_any_mode_without_ignore_compile_internals,
        ),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "forward mode": (torch._C._is_fwd_grad_enabled(), forward_ad._current_level),
        "functions of one level": functorch.get_single_level_autograd_function_allowed(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "attention": (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
        "frames": torch._C._dynamo.eval_frame.get_eval_frame_callback(),
        "settings": (torch._dynamo.config.allow_rnn, torch._dynamo.config.skip_nnmodule_hook_guards),
    }


def slots(module):
    """Everything that the parts of a module hold, but for the list of weights that recurrent layers make anew."""
    return [
        (
            type(part),
            {**part._parameters},
            {**part._buffers},
            {k: v for k, v in vars(part).items() if k != "_flat_weights"},
        )
        for part in module.modules()
    ]


def is_same(a, b):
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    return a is b or a == b


@contextmanager
def interrupted_within(seconds):
    """Deliver one signal after a while; one that comes too late is forgotten."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def cases(programs=None):
    """Name, module and call; of those with programs the chosen ones: first calls take up to seconds."""
    torch.manual_seed(0)
    xs = torch.randn(6, 5)
    for model in (Layers(), Everything()):
        for engine in ("eager", "loop", "traced", "compiled"):
            for reduce in (Stack(), Norm(), ClippedMean(1.0)):

                def call(model=model, engine=engine, reduce=reduce):
                    return per_sample_grads(lambda model, x: model(x), model, xs, reduce, engine=engine)

                name = f"{type(model).__name__} {engine} {type(reduce).__name__}"
                if engine in {"eager", "loop"} or programs is None or name in programs:
                    yield name, model, call
        yield (
            f"{type(model).__name__} composite",
            model,
            lambda model=model: composite_grads(lambda model, x: model(x), torch.sum, model, xs)[1],
        )


def run(count, seed, programs=None):
    """Interrupt calls at random moments; return how many were, by case."""
    chosen, hits, ready = random.Random(seed), Counter(), []
    for name, model, call in cases(programs):
        expected = call()
        start = time.perf_counter()
        call()
        ready.append((name, model, call, expected, time.perf_counter() - start))
    whole = state()
    while hits.total() < count:
        name, model, call, expected, seconds = chosen.choice(ready)
        before = slots(model)
        try:
            with interrupted_within(chosen.uniform(1e-6, seconds)):
                call()
        except Interrupted:
            hits[name] += 1
        except RuntimeError as error:  # Python printed the interrupt, in a destructor say, and torch's own stack broke
            assert "INTERNAL ASSERT FAILED" in str(error), name  # noqa: PT017 - it is one of two ways to end
            hits[name] += 1
        assert state() == whole, name
        assert is_same(before, slots(model)), name
        found, wanted = pytree.tree_leaves(call()), pytree.tree_leaves(expected)
        assert all(map(torch.equal, found, wanted)), name
    assert_no_lock_is_held(lambda: [call() for _, _, call in cases(programs)])
    return hits


def assert_no_lock_is_held(call):
    waiting = threading.Thread(target=call, daemon=True)
    waiting.start()
    waiting.join(120)
    assert not waiting.is_alive()


def test_interrupts_leave_everything_whole():
    assert len(run(150, seed=0, programs={"Layers traced ClippedMean", "Layers compiled ClippedMean"})) > 10


def callers(frame):
    while frame := frame.f_back:
        yield frame.f_code.co_name


@contextmanager
def interrupted_at(package, line=0):
    """Raise before the given line, of those that run in a module, or in files of a package; list what has run.

    Dynamo evaluates operations on fake tensors in C++ of torch that calls Python again and that no exception may leave:
    it ends the process. Interrupts wait for the end of ``run_node``.
    """
    is_package = hasattr(package, "__path__")
    lines, folder = [], str(Path(package.__file__).parent if is_package else package.__file__)

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if 0 < line <= len(lines) and "run_node" not in callers(frame):
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(("package", "count"), [(persample, 8), (torch._dynamo, 5)], ids=["persample", "dynamo"])
def test_interrupts_of_a_first_call_leave_everything_whole(package, count):
    model, xs = Layers(), torch.randn(6, 5)

    def call():
        clear_cache()
        return per_sample_grads(lambda model, x: model(x), model, xs, Norm(), engine="traced")

    expected, whole, before = call(), state(), slots(model)
    with interrupted_at(package) as lines:
        call()
    hits = 0
    for line in sorted(random.Random(2).sample(range(1, len(lines)), count)):
        try:
            with interrupted_at(package, line):
                call()
        except Interrupted:
            hits += 1
        except LossError as error:  # torch caught the interrupt, and what it was doing is half done
            assert "cannot be traced" in str(error), lines[line - 1]  # noqa: PT017 - it is one of two ways to end
        assert state() == whole, lines[line - 1]
        assert is_same(before, slots(model)), lines[line - 1]
    assert hits > count // 2  # Dynamo swallows those that come while it describes guards
    assert torch.equal(call(), expected)
    assert_no_lock_is_held(call)


@contextmanager
def interrupted_at_moment(moment=0):
    """Raise where CPython handles signals: at the start of a function, or after a call of one in C. Count moments.

    What the garbage collector calls is left out: it comes at another moment each time, and Python prints its errors.
    """
    passed = []

    def profile(_frame, event, _):
        if event in {"call", "c_return"}:
            passed.append(event)
            if len(passed) == moment:
                raise Interrupted

    gc.disable()
    sys.setprofile(profile)
    try:
        yield passed
    finally:
        sys.setprofile(None)
        gc.enable()


@pytest.mark.parametrize(
    "options", [{}, {"differentiable": True}, {"engine": "loop"}], ids=["eager", "differentiable", "loop"]
)
def test_an_interrupt_at_any_moment_leaves_everything_whole(options):
    model, xs = Layers(), torch.randn(6, 5)

    def call():
        return per_sample_grads(lambda model, x: model(x), model, xs, ClippedMean(1.0), **options)

    expected, whole, before = [*call().values()], state(), slots(model)
    with interrupted_at_moment() as moments:
        call()
    for moment in range(1, len(moments), 11):
        with pytest.raises(Interrupted), interrupted_at_moment(moment):
            call()
        assert state() == whole, moment
        assert is_same(before, slots(model)), moment
        assert not any(lock._is_owned() for lock in isolation._locks.values()), moment
        assert all(map(torch.equal, call().values(), expected)), moment
    assert_no_lock_is_held(call)


class Operators(_python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_a_mode(w, x):
    with Operators():
        return torch.tanh(w * x).sum()


def under_autocast(w, x):
    with torch.autocast("cpu"):
        return torch.tanh(w * x).sum()


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("loss", [under_a_mode, under_autocast])
def test_an_interrupt_in_a_context_of_the_loss_leaves_nothing_open(loss, differentiable):
    """Torch keeps flags of dispatch modes once for all threads."""

    def call():
        return per_sample_grads(loss, torch.ones(3), torch.ones(2, 3), Norm(), differentiable=differentiable)

    expected, whole, hits = call(), (state(), torch.is_autocast_enabled("cpu")), 0
    with interrupted_at_moment() as moments:
        call()
    for moment in range(1, len(moments), 5):
        try:
            with interrupted_at_moment(moment):
                call()
        except Interrupted:
            hits += 1
        assert (state(), torch.is_autocast_enabled("cpu")) == whole, moment
        assert torch.equal(call(), expected), moment
    assert hits > 0.9 * len(range(1, len(moments), 5))  # of most of them: Python prints the errors of callbacks


@pytest.mark.slow
def test_2000_interrupts_leave_everything_whole():
    hits = run(2000, seed=1)
    print(f"{hits.total()} interrupts: {dict(sorted(hits.items()))}")
    assert len(hits) == 20


def test_an_interrupt_of_an_undoing_leaves_it_to_the_next():
    calls = []

    def undo():
        calls.append("undo")
        if len(calls) == 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        isolation.undone(lambda: None, undo)
    assert calls == ["undo", "undo"]


def test_an_error_that_torch_raises_in_the_wake_of_an_interrupt_gives_way_to_it():
    def broken_off(w, x):
        try:
            interrupt()
        finally:
            raise RuntimeError("internal assert")

    for engine in ("eager", "loop"):
        with pytest.raises(Interrupted):
            per_sample_grads(broken_off, torch.ones(2), torch.ones(3, 2), engine=engine)


def test_errors_of_calls_made_while_an_interrupt_is_handled_are_their_own():
    def wrong(w, x):
        raise RuntimeError("mine")

    try:
        interrupt()
    except Interrupted:
        with pytest.raises(RuntimeError, match="mine"):
            per_sample_grads(wrong, torch.ones(2), torch.ones(3, 2))


def test_modes_of_the_caller_are_there_again_where_torch_took_them_off():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        isolation.isolated(None, torch.overrides._pop_mode)
        assert torch.overrides._get_current_function_mode_stack() == [mode]


INTERRUPTED = """
import signal, sys
import torch
from persample import per_sample_grads

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a job in the background starts with ignores it

class Finder:
    def find_spec(self, name, path, target=None):
        if name == MODULE:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

def loss(w, x):
    return (w * x).sum() ** 2

def call():
    return per_sample_grads(loss, torch.ones(3), torch.ones(4, 3), engine=ENGINE)

sys.meta_path.insert(0, Finder())
try:
    call()
except KeyboardInterrupt:
    print("interrupted")
assert MODULE in sys.modules
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(call()[0].tolist())
"""


@pytest.mark.parametrize(
    ("engine", "module"),
    [
        ("compiled", "torch._inductor.codecache"),
        pytest.param("compiled", "torch._dynamo.symbolic_convert", marks=pytest.mark.slow),
        pytest.param("auto", "sympy.printing", marks=pytest.mark.slow),
        pytest.param("traced", "torch._dynamo.symbolic_convert", marks=pytest.mark.slow),
        pytest.param("compiled", "sympy.printing", marks=pytest.mark.slow),
        pytest.param("compiled", "torch._inductor.fx_passes.fuse_attention", marks=pytest.mark.slow),
    ],
)
def test_an_import_ends_before_an_interrupt(engine, module):
    program = INTERRUPTED.replace("MODULE", repr(module)).replace("ENGINE", repr(engine))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "CXX": "/nowhere/g++", "PYTHONPATH": str(Path(persample.__file__).parents[1])},
        check=False,
    )
    assert done.stdout == "interrupted\n[6.0, 6.0, 6.0]\n", done.stderr


def importing(body):
    """Call a function from a frame like that of an import."""
    names = {}
    exec(compile("def load(body): return body()", "<frozen importlib._bootstrap>", "exec"), names)
    return names["load"](body)


def test_interrupts_wait_for_imports_inside_alone():
    went_on = []

    def load():
        signal.raise_signal(signal.SIGALRM)
        went_on.append("load")

    def call():
        importing(load)
        time.sleep(1)
        went_on.append("call")

    with pytest.raises(Interrupted):
        isolation.after_imports(call)
    assert went_on == ["load"]
    with pytest.raises(Interrupted):  # an import of the caller's, such as that of a script
        importing(lambda: isolation.after_imports(lambda: signal.raise_signal(signal.SIGALRM)))
    with pytest.raises(Interrupted):  # at the very end
        isolation.after_imports(lambda: importing(load))
    assert signal.getsignal(signal.SIGALRM) is interrupt


def test_other_threads_and_handlers_set_meanwhile_are_left_alone():
    found = []
    thread = threading.Thread(target=lambda: found.append(isolation.after_imports(lambda: 3)))
    thread.start()
    thread.join()
    isolation.after_imports(lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN))
    assert (found, signal.getsignal(signal.SIGALRM)) == ([3], signal.SIG_IGN)


def test_an_interrupted_capture_is_completed():
    """Wherever a graph of Dynamo is rewritten, which is done in place."""
    w, x = torch.randn(3), torch.randn(4, 3)

    def loss(w, x):
        out = torch.zeros(3)
        out[:2] = torch.func.vmap(lambda a: torch.tanh(w * a).sum())(x[:2])
        return out.sum() ** 2

    def call():
        return per_sample_grads(loss, w, (x,), engine="traced")

    clear_cache()
    with interrupted_at(batchable) as lines:
        expected = call()
    torch.testing.assert_close(expected, per_sample_grads(loss, w, (x,), engine="loop"))
    hits = 0
    for line in random.Random(0).sample(range(1, len(lines)), 6):
        clear_cache()
        try:
            with interrupted_at(batchable, line):
                call()
        except Interrupted:
            hits += 1
        assert torch.equal(call(), expected), lines[line - 1]
    assert hits > 3  # the others came within Dynamo


@pytest.mark.parametrize("engine", ["loop", "eager"])
def test_hooks_of_saved_tensors_are_taken_off(engine):
    """As if a signal came between the push of a context and its pop."""

    def loss(m, x):
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
        raise KeyboardInterrupt

    for outer in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if outer else nullcontext():
            before = _torch.top_saved_tensors_hooks()
            with pytest.raises(KeyboardInterrupt):
                per_sample_grads(loss, nn.Linear(3, 2), torch.randn(4, 3), engine=engine)
            assert _torch.top_saved_tensors_hooks() is before or _torch.top_saved_tensors_hooks() == before
    assert _torch.top_saved_tensors_hooks() is None


def test_a_capture_leaves_no_context_variables():
    """Since torch 2.15 Dynamo notes there which objects it is at, and an interrupt would leave the note."""

    def call():
        clear_cache()
        return per_sample_grads(lambda w, x: w["a"] @ x, {"a": torch.ones(3)}, torch.ones(2, 3), engine="traced")

    before = dict(contextvars.copy_context().items())
    call()
    assert dict(contextvars.copy_context().items()) == before
