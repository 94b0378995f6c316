"""The programs of docs/examples: short, shown on the page, and they reach what they promise."""

from __future__ import annotations

import runpy

from paths import ROOT

FOLDER = ROOT / "docs" / "examples"


def main(name):
    """Run a program as a module of its own."""
    return runpy.run_path(str(FOLDER / f"{name}.py"))["main"]()


def test_private_training_lowers_the_loss_within_its_budget():
    found = main("dp_lora")
    assert found["after"] < 0.5 * found["before"]
    assert 3.9 < found["epsilon"] <= 4.0


def test_clipped_grpo_raises_the_reward():
    history = main("grpo")
    first, last = ([update["reward"] for update in part] for part in (history[:10], history[-10:]))
    assert sum(last) / 10 > sum(first) / 10 + 0.15
    assert all(0 <= update["clipped"] <= 1 and 0 <= update["conflicts"] <= 1 for update in history)
    assert sum(update["within"] >= update["between"] for update in history) > 0.8 * len(history)


def test_the_chosen_data_are_of_the_wanted_task_and_train_it():
    found = main("select_data")
    assert found["right"] > 0.9
    assert found["chosen"] < 0.8 * found["random"]


def test_programs_are_short_and_on_the_page():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    programs = sorted(FOLDER.glob("*.py"))
    assert [page.count(f'--8<-- "docs/examples/{path.name}"') for path in programs] == [1, 1, 1]
    for path in programs:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 80, path.name
        assert "    # - " in text, path.name  # what the ordinary loop had
