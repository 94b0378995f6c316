"""The naive loops: against formulas and plain ``.backward()``, and what they promise about graphs and ``.grad``."""

from __future__ import annotations

import weakref

import pytest
import torch

from persample.naive import backward_each, loop, stack_mean_backward, value_and_grad

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def squared_error(params, x, y):
    return (params["w"] @ x + params["b"] - y) ** 2


@pytest.fixture
def regression():
    """Parameters, batch, and the gradients 2e·x and 2e of the squared errors e², by hand."""
    params, x, y = {"w": draw(3), "b": draw(1)[0]}, draw(5, 3, seed=1), draw(5, seed=2)
    error = x @ params["w"] + params["b"] - y
    return params, (x, y), error**2, {"w": 2 * error[:, None] * x, "b": 2 * error}


class TestLoop:
    def test_losses_and_gradients_in_order(self, regression):
        params, batch, losses, grads = regression
        pairs = list(loop(squared_error, params, batch))
        assert len(pairs) == 5
        for i, (loss, grad) in enumerate(pairs):
            close(loss, losses[i])
            close(grad, {name: rows[i] for name, rows in grads.items()})
            assert not loss.requires_grad

    def test_parameters_in_any_tree(self):
        params = {"net": [draw(2), (draw(1)[0],)], "scale": draw(1, seed=3)[0]}
        x = draw(3, 2, seed=4)

        def loss(params, x):
            return params["scale"] * (params["net"][0] @ x + params["net"][1][0])

        for i, (_, grad) in enumerate(loop(loss, params, (x,))):
            inner = params["net"][0] @ x[i] + params["net"][1][0]
            close(grad, {"net": [params["scale"] * x[i], (params["scale"],)], "scale": inner})

    def test_a_bare_tensor_is_a_tree(self):
        (_, grad), (_, second) = loop(lambda w, x: w @ x, draw(3), (draw(2, 3, seed=1),))
        close(torch.stack([grad, second]), draw(2, 3, seed=1))

    def test_an_ignored_parameter_has_zeros(self):
        params = {"used": draw(2), "ignored": draw(2, 3)}
        for _, grad in loop(lambda p, x: p["used"] @ x, params, (draw(2, 2),)):
            assert torch.equal(grad["ignored"], torch.zeros(2, 3, dtype=F64))
            assert grad["used"].all()

    def test_a_loss_that_depends_on_nothing_has_zeros(self):
        ((loss, grad),) = loop(lambda _, x: x.sum(), draw(2), (torch.ones(1, 3),))
        assert loss == 3
        assert torch.equal(grad, torch.zeros(2, dtype=F64))

    def test_one_sample_at_a_time(self):
        seen = []

        def loss(w, x):
            seen.append(x.item())
            return w * x

        rows = loop(loss, torch.tensor(1.0), (torch.tensor([1.0, 2.0, 3.0]),))
        assert seen == []
        next(rows)
        assert seen == [1.0]
        next(rows)
        assert seen == [1.0, 2.0]

    def test_batches_of_different_sizes_are_refused(self):
        with pytest.raises(ValueError, match="shorter"):
            list(loop(squared_error, {"w": draw(3), "b": draw(1)[0]}, (draw(3, 3), draw(2))))

    @pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad], ids=["grad", "no_grad"])
    def test_the_users_parameters_are_left_alone(self, grad_mode):
        w = draw(2).requires_grad_()
        w.grad = torch.full((2,), 7.0, dtype=F64)
        with grad_mode():
            ((_, grad),) = loop(lambda w, x: (w * x).sum(), w, (torch.full((1, 2), 3.0, dtype=F64),))
        assert torch.equal(w.grad, torch.full((2,), 7.0, dtype=F64))
        assert w.requires_grad
        assert not grad.requires_grad
        close(grad, torch.full((2,), 3.0, dtype=F64))


class TestValueAndGrad:
    def test_value_aux_and_gradients(self):
        w, b, x = draw(3)
        loss, aux, grads = value_and_grad(
            lambda p, x: ((p[0] * x + p[1]) ** 2, {"out": p[0] * x, "tag": "a"}), (w, b), x
        )
        close(loss, (w * x + b) ** 2)
        close(aux["out"], w * x)
        close(torch.stack(grads), torch.stack([2 * (w * x + b) * x, 2 * (w * x + b)]))
        assert aux["tag"] == "a"
        assert not loss.requires_grad
        assert not aux["out"].requires_grad

    def test_none_marks_what_the_loss_ignores(self):
        _, _, (used, ignored) = value_and_grad(lambda p: (p[0] * 2, ()), (draw(1)[0], draw(4)))
        assert used == 2
        assert ignored is None

    def test_none_everywhere_without_a_path_to_any_parameter(self):
        loss, _, grads = value_and_grad(lambda _, x: (x * 2, ()), (draw(1)[0], draw(4)), torch.tensor(3.0))
        assert loss == 6
        assert grads == (None, None)

    def test_under_no_grad(self):
        with torch.no_grad():
            _, _, (grad,) = value_and_grad(lambda p, x: (p[0] * x, ()), (torch.tensor(2.0),), torch.tensor(3.0))
        assert grad == 3


def graph_losses(params, batch):
    return [squared_error(params, *sample) for sample in zip(*batch, strict=True)]


def leaves_of(params):
    return {name: p.clone().requires_grad_() for name, p in params.items()}


def stacked(losses, params, **_):
    return stack_mean_backward(losses, params)


def each_of_a_generator(losses, params, n=None):
    return backward_each((loss for loss in losses), params, len(losses) if n is None else n)


WAYS = {"stack": stacked, "each-of-list": backward_each, "each-of-generator": each_of_a_generator}


class TestListsOfLosses:
    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    def test_the_mean_gradient(self, regression, way):
        params, batch, _, grads = regression
        leaves = leaves_of(params)
        close(way(graph_losses(leaves, batch), leaves), {name: rows.mean(0) for name, rows in grads.items()})

    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    def test_equals_backward_of_the_mean_and_leaves_grad_alone(self, regression, way):
        params, batch, *_ = regression
        reference, leaves = leaves_of(params), leaves_of(params)
        torch.stack(graph_losses(reference, batch)).mean().backward()
        leaves["w"].grad = torch.full((3,), 7.0, dtype=F64)
        update = way(graph_losses(leaves, batch), leaves)
        close(update, {name: p.grad for name, p in reference.items()})
        assert torch.equal(leaves["w"].grad, torch.full((3,), 7.0, dtype=F64))
        assert leaves["b"].grad is None
        assert not any(leaf.requires_grad for leaf in update.values())

    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    def test_an_ignored_parameter_has_zeros(self, way):
        leaves = {"used": draw(2).requires_grad_(), "ignored": [draw(2, 3).requires_grad_()]}
        update = way([leaves["used"].sum(), leaves["used"].sum()], leaves)
        assert torch.equal(update["ignored"][0], torch.zeros(2, 3, dtype=F64))
        close(update["used"], torch.ones(2, dtype=F64))

    @pytest.mark.parametrize("way", [stacked, backward_each], ids=["stack", "each-of-list"])
    def test_a_loss_that_depends_on_no_parameter_adds_zero(self, way):
        w = torch.tensor(2.0, requires_grad=True)
        assert way([w * 3, torch.tensor(5.0)], w) == 1.5

    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    def test_one_loss(self, way):
        w = torch.tensor(2.0, requires_grad=True)
        assert way([w**2], w) == 4

    def test_losses_that_share_a_graph_need_retain_graph(self):
        w = torch.tensor(2.0, requires_grad=True)

        def losses():
            shared = w**2  # its backward needs a saved w, which the first backward frees
            return [shared * 1, shared * 3]

        assert stack_mean_backward(losses(), w) == 8
        assert backward_each(losses(), w, retain_graph=True) == 8
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            backward_each(losses(), w)

    @pytest.mark.parametrize("retain", [False, True], ids=["freed", "retained"])
    def test_graphs_are_freed_unless_retained(self, retain):
        w = torch.tensor(2.0, requires_grad=True)
        loss = w**2
        backward_each([loss], w, retain_graph=retain)
        if retain:
            assert torch.autograd.grad(loss, w)[0] == 4
        else:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                torch.autograd.grad(loss, w)

    def test_a_generator_is_asked_for_one_loss_at_a_time(self):
        w = torch.tensor(2.0, requires_grad=True)
        events = []

        def losses():
            for k in (1.0, 3.0):
                events.append(f"build {k}")
                loss = w * k
                loss.register_hook(lambda _, k=k: events.append(f"backward {k}"))
                yield loss

        assert backward_each(losses(), w, n=2) == 2
        assert events == ["build 1.0", "backward 1.0", "build 3.0", "backward 3.0"]

    @pytest.mark.parametrize("retain", [False, True], ids=["freed", "retained"])
    def test_a_loss_of_a_generator_is_gone_before_the_next_is_built(self, retain):
        w = torch.tensor(2.0, requires_grad=True)
        built, alive = [], []

        def build(k):
            alive.append([k for k, loss in enumerate(built) if loss() is not None])
            loss = w**k
            built.append(weakref.ref(loss))
            return loss

        assert backward_each((build(k) for k in range(1, 5)), w, n=4, retain_graph=retain) == 12.25
        assert alive == [[], [], [], []]

    def test_n_is_the_divisor(self):
        w = torch.tensor(2.0, requires_grad=True)
        assert backward_each((w * k for k in (1.0, 3.0)), w, n=8) == 0.5

    def test_a_generator_needs_n(self):
        w = torch.tensor(2.0, requires_grad=True)
        with pytest.raises((TypeError, ValueError), match=r"\bn\b"):
            backward_each((w * k for k in (1.0, 3.0)), w)
