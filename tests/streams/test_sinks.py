"""``accumulate`` into a folder: the same results, whole after every batch, the same bits after a kill."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import killed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import assert_trees_close
from paths import TESTS
from seams import commits_after_every_batch
from torch import nn

import persample as ps
from persample import ArgumentError, SinkError, accumulate, per_sample_grads, read_sink
from persample.streams.sink.files import Index

F64 = torch.float64
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
WANTED = {
    "rows": None,
    "norms": ps.Norm(per_param=True),
    "losses": ps.Loss(),
    "aux": ps.Aux(),
    "projected": ps.Project(3, seed=0),
    "sums": [ps.Mean(), ps.ClippedSum(1.0), ps.Variance(), ps.NoiseScale()],
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def loss(w, x):
    return (w["a"] @ x).sin() + x[0] * w["b"].square(), {"x": x, "positive": x > 0}


PARAMS = {"a": draw(3), "b": draw(1, seed=1)[0]}
X = draw(11, 3, seed=2)
SIZES = [3, 0, 1, 4, 3]


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture(autouse=True)
def _commits(monkeypatch):
    commits_after_every_batch(monkeypatch)


@pytest.fixture
def finished(tmp_path):
    """A finished folder."""
    accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "done")
    return tmp_path / "done"


def stopped_after(folder, batches, **options):
    """Run until the source of the batches fails."""

    def source():
        yield from X.split(SIZES)[:batches]
        raise OSError("the source has failed")

    with pytest.raises(OSError, match="the source has failed"):
        accumulate(loss, PARAMS, source(), WANTED, sink=folder, **options)


class TestResults:
    def test_are_those_in_memory(self, tmp_path):
        results = accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "new" / "folder", chunk_size=2)
        expected = per_sample_grads(loss, PARAMS, X, WANTED)
        expected["aux"]["positive"] = expected["aux"]["positive"].double()
        results["aux"]["positive"] = results["aux"]["positive"].double()
        assert_trees_close(results, expected, 1e-9)

    def test_are_read_back_by_name(self, finished):
        found = read_sink(finished)
        expected = accumulate(loss, PARAMS, X.split(SIZES), WANTED)
        assert torch.equal(found["rows.a"], expected["rows"]["a"])
        assert torch.equal(found["sums.0.b"], expected["sums"][0]["b"])
        assert torch.equal(found["sums.3.noise_scale"], expected["sums"][3].noise_scale)
        assert found["aux.positive"].dtype == torch.bool
        assert len(found) == 2 + 2 + 1 + 2 + 1 + 3 * 2 + 3

    def test_are_ordinary_files_of_numpy(self, finished):
        record = json.loads((finished / "index.json").read_text())["rows"]["result['losses']"]
        expected = per_sample_grads(loss, PARAMS, X, ps.Loss()).numpy()
        assert np.allclose(np.load(finished / record["file"], allow_pickle=False), expected)

    def test_of_one_reduction(self, tmp_path):
        norms = accumulate(loss, PARAMS, X.split(SIZES), ps.Norm(), sink=tmp_path / "norms")
        assert torch.equal(read_sink(tmp_path / "norms")["result"], norms)

    def test_whose_names_would_be_equal_are_named_by_expressions(self, tmp_path):
        wanted = {"a.b": ps.Norm(), "a": {"b": ps.Loss()}}
        accumulate(lambda w, x: w @ x, torch.ones(3), [torch.ones(2, 3)], wanted, sink=tmp_path / "both")
        assert read_sink(tmp_path / "both").keys() == {"result['a.b']", "result['a']['b']"}

    @pytest.mark.parametrize(
        "dtype",
        [torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool],
        ids=lambda dtype: str(dtype).removeprefix("torch."),
    )
    def test_of_every_dtype(self, tmp_path, dtype):
        aux = (3 * X).to(dtype)
        loss = lambda w, x, aux: ((w * x).sum(), aux)
        wanted, batches = ps.Aux(), list(zip(X.split(SIZES), aux.split(SIZES), strict=True))
        assert torch.equal(accumulate(loss, draw(3), batches, wanted, sink=tmp_path / "aux"), aux)
        assert read_sink(tmp_path / "aux")["result"].dtype == dtype

    def test_without_samples(self, tmp_path):
        results = accumulate(loss, PARAMS, [X[:0]], {"rows": None, "sum": ps.Sum()}, sink=tmp_path / "none")
        assert_trees_close(results, per_sample_grads(loss, PARAMS, X[:0], {"rows": None, "sum": ps.Sum()}), 0)

    def test_may_be_overwritten_in_memory_alone(self, finished):
        read_sink(finished)["losses"].zero_()
        assert read_sink(finished)["losses"].all()

    def test_of_a_finished_folder_are_returned_again(self, finished):
        called = []

        def counted(w, x):
            called.append(1)
            return loss(w, x)

        counted.__module__, counted.__qualname__ = loss.__module__, loss.__qualname__
        before = contents(finished)
        again = accumulate(counted, PARAMS, iter(X.split(SIZES)), WANTED, sink=finished, resume=True)
        expected = accumulate(loss, PARAMS, X.split(SIZES), WANTED)
        assert torch.equal(again["rows"]["a"], expected["rows"]["a"])
        assert contents(finished) == before
        assert len(called) == 1  # for the structure of the results, with a made-up sample

    def test_memory_holds_no_rows(self, tmp_path):
        from persample.utils.measure import peak_memory

        def peak(batches):
            source = (torch.ones(4, 2000) for _ in range(batches))
            run = lambda: accumulate(lambda w, x: w @ x, torch.ones(2000), source, sink=tmp_path / str(batches))
            return peak_memory(run)

        assert peak(12) < peak(3) + 4 * 2000 * 4


class TestResume:
    @pytest.mark.parametrize("batches", range(len(SIZES) + 1))
    def test_ends_with_the_same_bits(self, finished, tmp_path, batches):
        stopped_after(tmp_path / "stopped", batches)
        computed = []

        def source():
            for number, x in enumerate(X.split(SIZES)):
                computed.append(number)
                yield x

        results = accumulate(loss, PARAMS, source(), WANTED, sink=tmp_path / "stopped", resume=True)
        assert contents(tmp_path / "stopped") == contents(finished)
        assert_trees_close(results["sums"], per_sample_grads(loss, PARAMS, X, WANTED)["sums"], 1e-9)

    def test_computes_no_batch_again(self, tmp_path):
        stopped_after(tmp_path / "stopped", 3)
        calls = []

        def counted(w, x):
            calls.append(1)
            return loss(w, x)

        counted.__module__, counted.__qualname__ = loss.__module__, loss.__qualname__
        accumulate(counted, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "stopped", resume=True)
        assert len(calls) == 1 + 2  # a made-up sample for the structure, and two batches

    @pytest.mark.parametrize("batches", [3, len(SIZES)], ids=["stopped", "finished"])
    @pytest.mark.parametrize("place", [0, 2])
    def test_with_other_weights(self, tmp_path, place, batches):
        weights = [torch.ones(size, dtype=torch.float64) for size in SIZES]

        def run(weights, stop, **options):
            source = X.split(SIZES)[:stop]
            return accumulate(loss, PARAMS, source, ps.Mean(), weights=weights, sink=tmp_path / "run", **options)

        if batches < len(SIZES):
            with pytest.raises(ArgumentError, match="fewer entries"):
                run(weights[:batches], None)
        else:
            run(weights, None)
        others = [3 * x if number == place else x for number, x in enumerate(weights)]
        with pytest.raises(ArgumentError, match=r"with these weights, in .*received others"):
            run(others, None, resume=True)

    def test_finished_with_other_batches(self, finished):
        for others in (X.flip(0).split(SIZES), [*X.split(SIZES), X[:1]], X.split(SIZES)[:2], X.split(4)):
            with pytest.raises(ArgumentError, match=r"batches: expected the batches of 11 samples, .*received others"):
                accumulate(loss, PARAMS, others, WANTED, sink=finished, resume=True)

    def test_again_and_again(self, finished, tmp_path):
        for batches in (1, 1, 3, 4):
            stopped_after(tmp_path / "stopped", batches, resume=True)
        accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "stopped", resume=True)
        assert contents(tmp_path / "stopped") == contents(finished)

    def test_of_nothing_starts(self, finished, tmp_path):
        accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "new", resume=True)
        assert contents(tmp_path / "new") == contents(finished)

    def test_with_weights(self, tmp_path):
        weights = draw(11).abs().split(SIZES)
        wanted = {"mean": ps.Mean(), "norms": ps.Norm()}

        def run(folder, batches, weights, **options):
            return accumulate(loss, PARAMS, batches, wanted, weights=weights, sink=tmp_path / folder, **options)

        with pytest.raises(ArgumentError, match="fewer entries"):
            run("stopped", X.split(SIZES), weights[:4])
        run("stopped", X.split(SIZES), weights, resume=True)
        run("straight", X.split(SIZES), weights)
        assert contents(tmp_path / "stopped") == contents(tmp_path / "straight")

    def test_with_the_same_numbers_for_all_samples(self, tmp_path):
        noisy = lambda w, x: (w * torch.rand(3, dtype=F64)) @ x

        def source(stop):
            yield from X.split(SIZES)[:3]
            if stop:
                raise OSError("the source has failed")
            yield from X.split(SIZES)[3:]

        folders = {"stopped": True, "straight": False}
        for name, stops in folders.items():
            torch.manual_seed(3)
            if stops:
                with pytest.raises(OSError, match="the source has failed"):
                    accumulate(noisy, draw(3), source(True), sink=tmp_path / name, randomness="same")
                torch.manual_seed(4)
            accumulate(noisy, draw(3), source(False), sink=tmp_path / name, randomness="same", resume=True)
        assert contents(tmp_path / "stopped") == contents(tmp_path / "straight")

    @pytest.mark.parametrize(
        "others", [X.flip(0).split(SIZES), X.split(4), X.split(SIZES)[:2]], ids=["order", "sizes", "few"]
    )
    def test_with_other_batches(self, tmp_path, others):
        stopped_after(tmp_path / "stopped", 3)
        message = r"batches: expected the (batches of 4 samples|3 batches that are in).*received (others|fewer)"
        with pytest.raises(ArgumentError, match=message):
            accumulate(loss, PARAMS, others, WANTED, sink=tmp_path / "stopped", resume=True)
        accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "stopped", resume=True)  # nothing is lost


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_was_killed_as_it_began(tmp_path, resume):
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "index.json.tmp").write_bytes(b"{")
    accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=folder, resume=resume)
    accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "straight")
    assert contents(folder) == contents(tmp_path / "straight")


class TestKill:
    """SIGKILL at a random moment: between batches, and between any two operations on files."""

    EVENTS = 230  # about as many as a run has

    def check(self, tmp_path, seed):
        events = random.Random(seed).sample(range(1, self.EVENTS), 2)
        for event in sorted(events):
            code = f"import killed; killed.run({str(tmp_path / 'killed')!r}, {event}, resume=True)"
            command = [sys.executable, "-c", code]
            process = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
            assert process.returncode in {-signal.SIGKILL, 0}, process.stderr
        killed.run(tmp_path / "killed", 0, resume=True)
        killed.run(tmp_path / "straight", 0, resume=False)
        assert contents(tmp_path / "killed") == contents(tmp_path / "straight"), events

    def test_at_two_random_moments(self, tmp_path):
        self.check(tmp_path, None)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(20))
    def test_at_many_random_moments(self, tmp_path, seed):
        self.check(tmp_path, seed)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def flip(place):
    def change(path):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(bytes(data))

    return change


MISSING = object()
RECORD = ("file", "dtype", "shape", "count", "crc32")


def reached(tree, where):
    for name in where:
        tree = tree[name]
    return tree


def forged(folder, where, value):
    """Change the index of a folder, and its checksum; return whether that changes anything."""
    index = json.loads((folder / "index.json").read_text())
    del index["crc32"]
    before = copy.deepcopy(index)
    if value is MISSING:
        del reached(index, where[:-1])[where[-1]]
    else:
        reached(index, where[:-1])[where[-1]] = value
    sealed(folder, json.dumps(index, indent=1).removesuffix("\n}"))
    return json.dumps(before) != json.dumps(index)


def sealed(folder, text):
    (folder / "index.json").write_text(f'{text},\n "crc32": {zlib.crc32(text.encode())}\n}}\n')


def pickled(path):
    np.save(path, np.array([print] * 11, dtype=object), allow_pickle=True)


class TestAlteredFiles:
    CHANGES = {  # noqa: RUF012
        "cut": (cut, "expected .* bytes, received"),
        "longer": (lengthen, "expected .* bytes, received"),
        "a bit of the rows": (flip(-3), "checksum"),
        "a bit of the header": (flip(20), "another header"),
        "removed": (Path.unlink, "expected a plain file, received No such file"),
        "pickled": (pickled, "expected"),
    }

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("name", ["rows-0001.npy", "value-0002.npy"])
    def test_are_named(self, finished, name, change):
        act, message = self.CHANGES[change]
        act(finished / name)
        with pytest.raises(SinkError, match=rf"sink: '.*{name}' was altered or cut short: .*{message}"):
            read_sink(finished)
        with pytest.raises(SinkError, match=name):
            accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=finished, resume=True)

    def test_are_found_without_their_checksum_by_size(self, finished):
        flip(-3)(finished / "rows-0001.npy")
        read_sink(finished, verify=False)
        cut(finished / "rows-0001.npy")
        with pytest.raises(SinkError, match="bytes"):
            read_sink(finished, verify=False)

    @pytest.mark.parametrize("name", ["rows-0001.npy", "sums-00000003.npz"])
    @pytest.mark.parametrize("change", ["cut", "a bit of the rows", "removed"])
    def test_are_not_resumed(self, tmp_path, name, change):
        stopped_after(tmp_path / "run", 3)
        self.CHANGES[change][0](tmp_path / "run" / name)
        with pytest.raises(SinkError, match=rf"{name}' was altered or cut short"):
            accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "run", resume=True)

    def test_sums_are_never_unpickled(self, tmp_path):
        """Not even where size and checksum in the index are those of the other file."""
        stopped_after(tmp_path / "run", 3)
        path = tmp_path / "run" / "sums-00000003.npz"
        np.savez(path, allow_pickle=True, weight=np.array([print], dtype=object))
        data = path.read_bytes()
        forged(tmp_path / "run", ["checkpoint", "size"], len(data))
        forged(tmp_path / "run", ["checkpoint", "crc32"], zlib.crc32(data))
        with pytest.raises(SinkError, match=r"sums-00000003.npz' was altered or cut short: expected arrays of numbers"):
            accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "run", resume=True)

    @pytest.mark.parametrize(
        "text", ["", "{}", "[1]", "null", '{"asked": {}, "rows": {"x": {"file": "x"}}}', '{"asked": {}, "format": "2"}']
    )
    def test_index(self, finished, text):
        (finished / "index.json").write_text(text)
        with pytest.raises(SinkError, match=r"index.json' is (no index|of another version)"):
            read_sink(finished)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("file", "../rows-0001.npy", r"expected the file 'rows-0004.npy' .*received .*\.\./rows-0001.npy"),
            ("file", "rows-0001.npy", r"expected the file 'rows-0004.npy' .*received .*rows-0001.npy"),
            ("dtype", "load", "a dtype of NumPy's, received .*'load'"),
            ("dtype", "qint8", "a dtype of NumPy's, received .*'qint8'"),
        ],
    )
    def test_index_that_names_something_else(self, finished, key, value, message):
        forged(finished, ["rows", "result['losses']", key], value)
        with pytest.raises(SinkError, match=rf"index.json' is no index of results .*{message}"):
            read_sink(finished)

    VALUES = (None, True, -1, 2**70, -(2**70), 1.5, float("nan"), float("inf"), "", "1", [], [1], [[1]], {}, {"a": 1})

    @pytest.mark.parametrize(
        "name", [*Index.__dataclass_fields__, *(f"rows/{x}" for x in RECORD), "rows/shape/0", "values/count"]
    )
    def test_index_with_a_value_of_another_kind(self, finished, name):
        """Whoever forges its checksum gets an error, too, or a tensor of as many bytes."""
        kind, *parts = name.split("/")
        result = {"rows": "result['rows']['a']", "values": "result['sums'][0]['a']"}
        where = [kind, result[kind], *parts] if parts else [kind]
        where = [int(part) if part.isdigit() else part for part in where]
        before = (finished / "index.json").read_bytes()
        for value in self.VALUES:
            if forged(finished, where, value):
                with pytest.raises((SinkError, ArgumentError), match=r"^(sink|batches|loss_fn): "):
                    accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=finished, resume=True)
            (finished / "index.json").write_bytes(before)

    @pytest.mark.parametrize("where", [[], ["rows", "result['losses']"]], ids=["index", "record"])
    def test_index_with_other_fields(self, finished, where):
        before = (finished / "index.json").read_bytes()
        fields = dict(reached(json.loads(before), where))
        if not where:
            del fields["crc32"]
        for name in [*fields, "another"]:
            assert forged(finished, [*where, name], 1 if name == "another" else MISSING)
            with pytest.raises(SinkError, match=r"index.json' is no index of results .*expected fields"):
                read_sink(finished)
            (finished / "index.json").write_bytes(before)

    def test_index_that_is_nested_deeply(self, finished):
        sealed(finished, '{\n "asked": ' + "[" * 100_000 + "]" * 100_000)
        with pytest.raises(SinkError, match=r"is no index of results \(RecursionError"):
            read_sink(finished)

    def test_index_of_the_first_format(self, finished):
        """It had no checksum; NumPy reads the files."""
        index = json.loads((finished / "index.json").read_text())
        del index["crc32"]
        text = json.dumps(index | {"format": "persample results 1"}, indent=1)
        (finished / "index.json").write_text(f"{text}\n")
        with pytest.raises(SinkError, match=r"its checksum is not that .* or of an older version.*numpy.load reads"):
            read_sink(finished)
        record = index["rows"]["result['losses']"]
        assert np.load(finished / record["file"]).shape == (11,)

    def test_folder_without_results(self, tmp_path):
        with pytest.raises(SinkError, match=r"index.json' is no index of results \(FileNotFoundError"):
            read_sink(tmp_path)

    def test_folder_of_a_run_that_has_not_ended(self, tmp_path):
        stopped_after(tmp_path / "run", 2)
        with pytest.raises(SinkError, match=r"holds 2 batches of a run that has not ended.*resume=True"):
            read_sink(tmp_path / "run")


class TestDamage:
    """Files that a disk, a network or a person has changed: the right rows, or an error of ours."""

    ASKED = {"norms": ps.Norm(), "rows": None, "mean": ps.Mean()}  # noqa: RUF012
    LAST = 4  # the batches of the run that has not ended

    def run(self, folder, stop=None):
        def source():
            yield from X.split(SIZES)[:stop]
            if stop:
                raise OSError("the source has failed")

        return accumulate(loss, PARAMS, source(), self.ASKED, sink=folder, resume=True)

    @pytest.fixture
    def whole(self, tmp_path):
        """A finished folder, and one of a run that has not ended."""
        self.run(tmp_path / "finished")
        with pytest.raises(OSError, match="the source has failed"):
            self.run(tmp_path / "stopped", self.LAST)
        return tmp_path / "finished", tmp_path / "stopped"

    def damage(self, folder, draws):
        """Change a file, or two; say what was done."""
        files = sorted(folder.iterdir())
        path = draws.choice([*files, folder / "index.json", folder / "index.json"])
        data, kind = bytearray(path.read_bytes()), draws.randrange(8)
        place = draws.randrange(len(data))
        if kind < 3:
            data[place] ^= 1 << draws.randrange(8)
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            data[place : place + draws.randrange(9)] = draws.randbytes(draws.randrange(9))
        elif kind == 5:
            data[place : place + 64] = bytes(64)
        elif kind == 6:
            path.unlink()
            return f"{path.name} removed"
        else:
            other = draws.choice(files)
            data, theirs = other.read_bytes(), data
            other.write_bytes(theirs)
        path.write_bytes(data)
        return f"{path.name}: {kind} at {place}"

    def check(self, whole, tmp_path, seed, rounds):
        draws, ends = random.Random(seed), Counter()
        expected, files = read_sink(whole[0]), contents(whole[0])
        for _ in range(rounds):
            for folder in whole:
                damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
                what = self.damage(damaged, draws)
                try:
                    found = read_sink(damaged)
                    assert list(found) == list(expected), what
                    assert all(torch.equal(found[name], expected[name]) for name in found), what
                    ends["right"] += 1
                except SinkError:
                    ends["read_sink"] += 1
                try:
                    self.run(damaged)
                    assert contents(damaged) == files, what
                    ends["right"] += 1
                except (SinkError, ArgumentError):
                    ends["resume"] += 1
                shutil.rmtree(damaged)
        assert min(ends["right"], ends["read_sink"], ends["resume"]) > rounds / 20, ends

    def test_of_a_few_files(self, whole, tmp_path):
        self.check(whole, tmp_path, 0, 40)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(1, 5))
    def test_of_many_files(self, whole, tmp_path, seed):
        self.check(whole, tmp_path, seed, 1000)

    def test_of_a_bit_anywhere_in_the_index(self, whole):
        for folder in whole:
            path = folder / "index.json"
            before = path.read_bytes()
            for place in range(0, len(before), 17):
                flip(place)(path)
                with pytest.raises(SinkError, match=r"index.json' is no index of results"):
                    read_sink(folder)
                path.write_bytes(before)


def link(path, outside):
    path.symlink_to(outside)


def hard_link(path, outside):
    path.hardlink_to(outside)


def pipe(path, _):
    os.mkfifo(path)


def directory(path, _):
    path.mkdir()


def bound_socket(path, _):
    here = Path.cwd()
    os.chdir(path.parent)  # the paths of sockets are short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)
    os.chdir(here)


def dangling(path, outside):
    path.symlink_to(outside.with_name("nowhere"))


def to_a_device(path, _):
    path.symlink_to("/dev/zero")


class TestWhatIsNoFile:
    """A folder that others may write to: nothing outside of it changes, and nothing waits."""

    KINDS = (link, hard_link, pipe, directory, bound_socket, dangling, to_a_device)

    def replaced(self, path, kind, outside):
        """Put something else in the place of a file, whose contents move out of the folder."""
        outside.write_bytes((path.read_bytes() if path.exists() else b"") + b"the rest of it")
        path.unlink(missing_ok=True)
        kind(path, outside)
        return outside.read_bytes()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["index.json", "index.json.tmp", "rows-0000.npy", "sums-00000003.npz"])
    def test_is_not_written_through(self, tmp_path, name, kind):
        folder, outside = tmp_path / "run", tmp_path / "outside"
        stopped_after(folder, 3)
        before = self.replaced(folder / name, kind, outside)
        with pytest.raises((SinkError, ArgumentError), match=r"^sink: "):
            accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=folder, resume=True)
        assert outside.read_bytes() == before
        assert not (tmp_path / "nowhere").exists()

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_no_run_that_was_killed_as_it_began(self, tmp_path, kind):
        folder, outside = tmp_path / "run", tmp_path / "outside"
        folder.mkdir()
        before = self.replaced(folder / "index.json.tmp", kind, outside)
        with pytest.raises((SinkError, ArgumentError), match=r"index.json.tmp' was altered.*expected a plain file"):
            accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=folder)
        assert outside.read_bytes() == before
        assert not (tmp_path / "nowhere").exists()

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not hard_link])
    @pytest.mark.parametrize("name", ["index.json", "rows-0000.npy", "value-0000.npy"])
    def test_is_not_read(self, finished, tmp_path, name, kind):
        self.replaced(finished / name, kind, tmp_path / "outside")
        for verify in (True, False):
            with pytest.raises(SinkError, match=rf"{name}' was altered or cut short: expected a plain file"):
                read_sink(finished, verify=verify)

    def test_as_the_folder_of_a_process(self, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "elsewhere").mkdir()
        dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
        options = {"sink": tmp_path / "run", "group": dist.group.WORLD, "resume": True}
        try:
            (tmp_path / "run" / "rank-00000-of-00001").symlink_to(tmp_path / "elsewhere")
            with pytest.raises(SinkError, match=r"rank-00000-of-00001' was altered .*: expected a folder, received a"):
                accumulate(loss, PARAMS, X.split(SIZES), WANTED, **options)
            (tmp_path / "run" / "rank-00000-of-00001").unlink()
            accumulate(loss, PARAMS, X.split(SIZES), WANTED, **options)
            (tmp_path / "run" / "rank-00000-of-00001").symlink_to(tmp_path / "elsewhere")
            with pytest.raises(SinkError, match="could not be written to"):
                accumulate(loss, PARAMS, X.split(SIZES), WANTED, **options)
        finally:
            dist.destroy_process_group()
        assert not any((tmp_path / "elsewhere").iterdir())


class TestRowsOfAnotherForm:
    """What a loss returns (aux) has one form in all batches, as it has in memory."""

    CHANGES = {  # noqa: RUF012
        "name": lambda x: {"y": x["x"]},
        "fewer": lambda x: {},
        "more": lambda x: x | {"y": x["x"]},
        "shape": lambda x: {"x": x["x"][:2]},
        "axes": lambda x: {"x": x["x"][None]},
        "dtype": lambda x: {"x": x["x"].float()},
        "width": lambda x: {"x": x["x"].long()},
    }

    @pytest.mark.parametrize("change", CHANGES)
    def test_in_a_later_batch(self, tmp_path, change):
        batches = list(X.split(4))

        def loss(w, x):
            aux = {"x": x}
            return w @ x, self.CHANGES[change](aux) if seen else aux

        seen = []

        def source():
            yield batches[0]
            seen.append(1)
            yield from batches[1:]

        with pytest.raises(ps.LossError, match=r"batches\[1\]: expected rows like those of earlier batches, .*'\]"):
            accumulate(loss, PARAMS["a"], source(), ps.Aux(), sink=tmp_path / "run")

    @pytest.mark.parametrize("change", CHANGES)
    def test_in_a_run_that_goes_on(self, tmp_path, change):
        def run(loss, stop, folder="run"):
            def source():
                yield from X.split(4)[:stop]
                if stop:
                    raise OSError("the source has failed")

            return accumulate(loss, PARAMS["a"], source(), ps.Aux(), sink=tmp_path / folder, resume=True)

        def loss(w, x):
            return w @ x, {"x": x}

        def other(w, x):
            return w @ x, self.CHANGES[change]({"x": x})

        other.__qualname__ = loss.__qualname__
        with pytest.raises(OSError, match="the source has failed"):
            run(loss, 2)
        with pytest.raises(ps.LossError, match="expected rows like those of earlier batches"):
            run(other, None)
        run(loss, None, "finished")
        if change in {"name", "fewer", "more"}:
            with pytest.raises(ArgumentError, match=r"loss_fn: expected the loss of the run in .*another, as .*differ"):
                run(other, None, "finished")


class TestFolder:
    def test_with_results_is_not_overwritten(self, finished):
        before = contents(finished)
        with pytest.raises(
            ArgumentError,
            match=r"sink: expected a new folder, received .* with the results of a run\. Read them by read_sink",
        ):
            accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=finished)
        assert contents(finished) == before

    def test_with_other_files_is_not_used(self, tmp_path):
        (tmp_path / "letter.txt").write_text("dear")
        with pytest.raises(ArgumentError, match="sink: expected a new folder, or one with results"):
            accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path, resume=True)
        assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (
                {"params": {"a": draw(3), "b": draw(1)[0]}},
                "a run with these params, received one whose params had other",
            ),
            ({"reduce": {**WANTED, "losses": ps.Norm()}}, "a run with reduce = "),
            ({"reduce": {**WANTED, "projected": ps.Project(3, seed=1)}}, "a run with reduce = .*seed=1"),
            ({"chunk_size": 2}, "a run with options = "),
            ({"loss_fn": lambda w, x: loss(w, 2 * x)}, "a run with loss_fn = "),
        ],
        ids=["params", "reductions", "seed", "options", "loss"],
    )
    def test_of_another_run(self, tmp_path, other, message):
        stopped_after(tmp_path / "run", 2)
        before = contents(tmp_path / "run")
        arguments = {"loss_fn": loss, "params": PARAMS, "batches": X.split(SIZES), "reduce": WANTED, **other}
        with pytest.raises(ArgumentError, match=rf"sink: expected the folder of {message}"):
            accumulate(**arguments, sink=tmp_path / "run", resume=True)
        assert contents(tmp_path / "run") == before

    def test_that_cannot_be_written_to(self, tmp_path):
        (tmp_path / "file").write_text("")
        for folder in ("/proc/persample", tmp_path / "file"):
            with pytest.raises(ArgumentError, match="sink: expected a folder that can be written to, received"):
                accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=folder)

    def test_on_a_disk_that_is_full(self, finished, tmp_path):
        """Writes beyond a limit fail, as on a full disk; what was committed before is whole."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)

        def source():
            for number, x in enumerate(X.split(SIZES)):
                if number == 2:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))
                yield x

        limited = ExitStack()
        limited.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)

        with limited, pytest.raises(SinkError, match=r"could not be written to \(File too large\).*resume=True"):
            accumulate(loss, PARAMS, source(), WANTED, sink=tmp_path / "full")
        accumulate(loss, PARAMS, X.split(SIZES), WANTED, sink=tmp_path / "full", resume=True)
        assert contents(tmp_path / "full") == contents(finished)

    @pytest.mark.parametrize(
        "reduction", [ps.Gram(), ps.CosineSimilarity(), ps.Factored()], ids=lambda x: type(x).__name__
    )
    def test_does_not_take_what_needs_all_gradients(self, tmp_path, reduction):
        message = (
            rf"reduce: expected reductions that are sums.*received {type(reduction).__name__}\(\) as result\['k'\]"
        )
        with pytest.raises(ArgumentError, match=message):
            accumulate(loss, PARAMS, X.split(SIZES), {"k": reduction}, sink=tmp_path / "new")

    def test_of_a_module_has_its_buffers_in_mind(self, tmp_path):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double().eval()
        loss = lambda m, x: m(x[None]).square().sum()

        def source():
            yield X[:2]
            raise OSError("the source has failed")

        with pytest.raises(OSError, match="the source has failed"):
            accumulate(loss, model, source(), ps.Norm(), sink=tmp_path / "run")
        model[1].running_mean += 1
        with pytest.raises(ArgumentError, match="a run with these params"):
            accumulate(loss, model, [X], ps.Norm(), sink=tmp_path / "run", resume=True)
