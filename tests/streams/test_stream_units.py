"""Units in streams: one unit may reach over several batches."""

import itertools
import tempfile

import pytest
import torch
from units import by_loop, close, flat, loss, made

from persample import ArgumentError, Aux, ClippedMean, Gram, Loss, Mean, Norm, UnitIds, accumulate, per_sample_grads

IDS = torch.tensor([5, 5, 5, 9, 9, *[2] * 12, 7, *[1] * 6])


def pieces(cuts, *tensors):
    return list(zip(*(x.split(cuts) for x in tensors), strict=True))


@pytest.mark.filterwarnings("ignore::persample.RecompilationWarning")  # of one loss with many sizes
@pytest.mark.parametrize(
    ("engine", "cuts"),
    [
        *itertools.product(["eager", "loop"], [[24], [4] * 6, [3, 2, 12, 1, 6], [0, 10, 0, 14]]),
        ("traced", [3, 2, 12, 1, 6]),
    ],
)
@pytest.mark.parametrize(("weighted", "reduce"), [(False, "sum"), (True, "mean")])
def test_unit_may_continue_in_the_next_batch(engine, cuts, weighted, reduce):
    net, batch = made()
    weights = torch.rand(24, dtype=torch.float64) * (torch.arange(24) > 2)
    order, grads, losses, counts = by_loop(net, batch, IDS, weights if weighted else None, reduce)
    norms = grads.norm(dim=1)
    bound = float(norms.median())
    wanted = {
        "update": ClippedMean(bound),
        "norms": Norm(),
        "ids": UnitIds(),
        "gram": Gram(),
        "losses": Loss(),
        "aux": Aux(),
    }
    parts = pieces(cuts, *batch, IDS, weights)
    found = accumulate(
        loss,
        net,
        [part[:2] for part in parts],
        wanted,
        unit=[part[2] for part in parts],
        unit_reduce=reduce,
        weights=[part[3] for part in parts] if weighted else None,
        engine=engine,
        chunk_size=7,
    )
    scale = torch.where(norms == 0, 1, (bound / norms).clamp(max=1)) * counts
    close(flat(found["update"]), (scale[:, None] * grads).sum(0) / counts.sum())
    close(found["norms"], norms)
    close(found["gram"], grads @ grads.T)
    close(found["losses"], losses)
    assert found["ids"].tolist() == order
    assert torch.equal(found["aux"]["index"], batch[0])


@pytest.mark.parametrize("engine", ["eager", "traced"])
@pytest.mark.parametrize("cuts", [[24], [5, 5, 5, 9], [8, 8, 8]])
def test_unit_of_a_number_of_samples_in_a_stream(engine, cuts):
    net, batch = made()
    _, grads, *_ = by_loop(net, batch, torch.arange(24) // 4)
    for _ in range(2):
        found = accumulate(loss, net, pieces(cuts, *batch), {"norms": Norm(), "mean": Mean()}, unit=4, engine=engine)
        close(found["norms"], grads.norm(dim=1))
        close(flat(found["mean"]), grads.mean(0))


def test_unit_ids_by_a_function_of_the_batch():
    batches = [{"x": torch.eye(2), "user": torch.tensor([3, 4])}, {"x": torch.ones(1, 2), "user": torch.tensor([4])}]
    found = accumulate(
        lambda w, sample: w @ sample["x"], torch.zeros(2), batches, (UnitIds(), None), unit=lambda batch: batch["user"]
    )
    assert found[0].tolist() == [3, 4]
    assert found[1].tolist() == [[1, 0], [1, 2]]


def test_units_in_a_folder_do_not_reach_over_batches():
    net, batch = made()
    parts = pieces([5, 12, 7], *batch, IDS)
    wanted = {"update": ClippedMean(1.0), "norms": Norm(), "aux": Aux()}
    options = {"unit": [part[2] for part in parts], "sink": tempfile.mkdtemp()}
    found = accumulate(loss, net, [part[:2] for part in parts], wanted, **options)
    expected = per_sample_grads(loss, net, batch, wanted, unit=IDS)
    close(found["norms"], expected["norms"])
    close(flat(found["update"]), flat(expected["update"]))
    again = accumulate(loss, net, [part[:2] for part in parts], wanted, **options, resume=True)
    assert torch.equal(again["norms"], found["norms"])
    parts = pieces([4, 20], *batch, IDS)
    options = {"unit": [part[2] for part in parts], "sink": tempfile.mkdtemp()}
    with pytest.raises(ArgumentError, match=r"batches\[1\]: unit: expected all samples of a unit in one batch, rec"):
        accumulate(loss, net, [part[:2] for part in parts], Mean(), **options)


def test_unit_that_comes_again_later():
    net, batch = made()
    parts = pieces([12, 12], *batch)
    with pytest.raises(ArgumentError, match=r"batches\[1\]: unit: expected .*received id 0 again, after other units"):
        accumulate(loss, net, parts, Mean(), unit=lambda batch: torch.tensor([0, 1] * 6))
    with pytest.raises(ArgumentError, match=r"unit: expected a divisor of .* all batches, received 5, which leaves 4"):
        accumulate(loss, net, parts, Mean(), unit=5)


def test_what_samples_of_a_unit_share_is_the_same_in_all_batches():
    batches = [(torch.ones(2), torch.tensor(1.0)), (torch.ones(2), torch.tensor(2.0))]
    options = {"in_dims": (None, (0, None)), "unit": [torch.zeros(2, dtype=torch.long)] * 2}
    with pytest.raises(ArgumentError, match="unit: expected what all samples share to be the same in all batches"):
        accumulate(lambda w, x, scale: w * x * scale, torch.tensor(1.0), batches, Mean(), **options)


def test_weights_of_all_samples_of_a_unit():
    batches = [torch.ones(2), torch.ones(2)]
    options = {"weights": [torch.ones(2), None], "unit": [torch.zeros(2, dtype=torch.long)] * 2}
    with pytest.raises(ArgumentError, match="unit: expected whether there are weights to be the same in all"):
        accumulate(lambda w, x: w * x, torch.tensor(1.0), batches, Mean(), **options)


def test_samples_that_wait_are_copied():
    def batches():
        buffer = torch.empty(2)
        for values in ([1.0, 2.0], [3.0, 4.0]):
            yield buffer.copy_(torch.tensor(values))

    def own(w, x):
        return w * x

    assert accumulate(own, torch.tensor(0.0), batches(), Norm(), unit=4).tolist() == [10]
    assert accumulate(own, torch.tensor(0.0), batches(), Norm(), unit=[[7, 7], [7, 8]]).tolist() == [6, 4]


def test_batches_that_do_not_fit_together_have_units_of_their_own():
    padded = [torch.ones(2, 3), torch.ones(2, 5)]
    found = accumulate(lambda w, x: (w * x).sum(), torch.ones(()), padded, Norm(), unit=[[0, 0], [1, 1]])
    assert found.tolist() == [6, 10]
    with pytest.raises(ArgumentError, match="unit: expected the shape of a sample to be the same in all batches"):
        accumulate(lambda w, x: (w * x).sum(), torch.ones(()), padded, Norm(), unit=[[0, 0], [0, 1]])
    scaled = [(torch.ones(2), torch.tensor(s)) for s in (1.0, 2.0)]
    options = {"in_dims": (None, (0, None)), "unit": [[0, 0], [1, 1]]}
    found = accumulate(lambda w, x, scale: w * x * scale, torch.tensor(1.0), scaled, Norm(), **options)
    assert found.tolist() == [2, 4]
    keys = [{"a": torch.ones(2)}, {"b": torch.ones(2)}]
    with pytest.raises(ArgumentError, match="unit: expected the structure of the samples to be the same"):
        accumulate(lambda w, x: w * sum(x.values()), torch.tensor(1.0), keys, Norm(), unit=4)


@pytest.mark.parametrize("engine", ["eager", "traced"])
def test_programs_of_a_stream_depend_on_how_units_are_reduced(engine):
    def own(w, x):
        return w @ x

    found = [
        accumulate(own, torch.zeros(1), [torch.ones(4, 1)], Norm(), unit=2, unit_reduce=reduce, engine=engine).tolist()
        for reduce in ("sum", "mean")
    ]
    assert found == [[2, 2], [1, 1]]


@pytest.mark.parametrize("unit", [0, True, -1])
def test_a_number_of_samples_is_positive(unit):
    with pytest.raises(ArgumentError, match="unit: expected a positive int, received"):
        accumulate(lambda w, x: w * x, torch.tensor(1.0), [torch.ones(2)], Norm(), unit=unit)
