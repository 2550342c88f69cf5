"""Several processes that share a batch compute the loss and gradients of one process, and raise the same errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shortlist.distributed import ALONE, current_processes
from tests.batches.steps import difference, dropping_conv_net, make, plain_step, some_images, take_gradients
from tests.processes import Commands
from tests.training import members
from tests.training.members import CASES, RANDOM, SIZES, Case, expected

EXACT = 1e-9
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of four processes, by rank."""
    folder = tmp_path_factory.mktemp("processes")
    script = Path(members.__file__)
    running = [commands.start(str(rank), folder, cwd=folder, script=script) for rank in range(4)]
    for each in running:
        assert each.wait() == 0, each.err
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


# The gradient


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_process(name: str, results: Results) -> None:
    want = expected(CASES[name])
    for size in CASES[name].sizes:
        for rank in range(size):
            for found, one in zip(results[rank]["steps"][name, size], want, strict=True):
                assert difference([found["loss"], found["embeddings"]], [one["loss"], one["embeddings"]]) < EXACT
                assert difference(found["gradients"], one["gradients"]) < EXACT


@pytest.mark.parametrize("name", CASES)
def test_all_processes_have_the_same_bits(name: str, results: Results) -> None:
    """Gradients and the state of the loss are equal bit for bit, so that processes do not drift apart."""
    for size in CASES[name].sizes:
        first, *others = (results[rank]["steps"][name, size] for rank in range(size))
        for other in others:
            for one, same in zip(first, other, strict=True):
                for part in ("gradients", "state"):
                    pairs = zip(one[part], same[part], strict=True)
                    assert all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", RANDOM)
def test_other_random_numbers_give_another_gradient(name: str) -> None:
    """Negative control: dropout and SiMix are active."""
    case = CASES[name]
    torch.manual_seed(4)
    model, loss = members.build(case)
    images, labels = next(members.batches(case))
    assert isinstance(images, torch.Tensor)
    torch.manual_seed(4)
    plain_step(model, loss, images.split(case.chunk_size), labels)
    assert difference(take_gradients(model, loss), expected(case)[0]["gradients"]) > 1e-3


def test_a_batch_has_the_chunks_of_one_process(results: Results) -> None:
    for size in SIZES:
        assert results[0]["steps"]["recall", size][0]["counts"] == (4, 0)
        assert results[0]["steps"]["recall, one chunk", size][0]["counts"] == (1, 0)
    assert results[2]["steps"]["recall, all graphs kept", 3][0]["counts"] == (4, 4)


@pytest.mark.parametrize("name", ["recall", "recall, chunks of one image", "simix", "memory"])
def test_what_is_sent_does_not_depend_on_the_number_of_chunks(name: str, results: Results) -> None:
    """Sent are the embeddings and their gradient once, the loss, and all gradients of the model in one tensor."""
    case: Case = CASES[name]
    model, _ = members.build(case)
    parameters = list(model.parameters())
    gradients = len(parameters) + sum(each.numel() for each in parameters)
    for size in set(case.sizes) - {1}:
        for step in results[0]["steps"][name, size]:
            (gathered, rows), *others = step["sent"]
            assert gathered == "all_gather_into_tensor"
            most = math.ceil(math.ceil(case.number / case.chunk_size) / size) * case.chunk_size  # of a process
            assert case.number <= rows / members.DIMENSIONS <= size * most
            assert others == [
                ("all_reduce", 1),
                ("all_to_all_single", case.number * members.DIMENSIONS),
                ("all_reduce", gradients),
            ]


def test_a_loss_of_something_else_than_the_batch_gets_the_whole_gradient(results: Results) -> None:
    sent = results[0]["steps"]["projected", 3][0]["sent"]
    assert ("all_reduce", 20 * 4) in sent


def test_the_default_process_group_is_used(results: Results) -> None:
    found = [each["default group"] for each in results]
    assert [number for _, number in found] == [4] * 4
    assert len({loss.item() for loss, _ in found}) == 1
    assert current_processes() is ALONE


# Failures


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        ("image", "DataError", "broken.jpg"),
        ("model", "OSError", "disk"),
        ("second pass", "ModelError", "The model returned different vectors for the same images in the second pass"),
        ("loss", "ZeroDivisionError", "in the loss"),
        ("head", "ZeroDivisionError", "in the head"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("statistics", "ModelError", "is in training mode"),
        ("other loss", "RunError", "in process 0 and "),
        ("infinite loss", "RunError", "and nan in process 1. It must be the same in all processes"),
        ("labels", "ValueError", "The processes have different labels"),
        ("number", "ValueError", "Got 19 images and 20 labels"),
        ("parts", "ValueError", "got 8 or more images, and embeds 4 of the 20 images of the batch"),
        ("main", "ZeroDivisionError", "division by zero"),
        (
            "weights",
            "RunError",
            "The weights or state of process 1 differ from those of process 0 in 1 tensors, such as b.",
        ),
        ("shape", "ModelError", "a is missing or has a different shape in process 0"),
    ],
)
def test_all_processes_raise_the_error_of_one(failure: str, kind: str, message: str, results: Results) -> None:
    """The processes can continue: each failure is followed by another one, and the last by a step."""
    found = [results[rank]["failures"][failure] for rank in range(3)]
    assert {name for name, _ in found} == {kind}
    assert len({text for _, text in found}) == 1
    assert message in found[0][1]


def test_an_interrupt_during_any_exchange(results: Results) -> None:
    """It takes effect after the exchange, in all processes; after the last exchange, only in the interrupted one."""
    first, second, third = (results[rank]["interrupted"] for rank in range(3))
    assert len(second) > 8
    assert second == ["", *["KeyboardInterrupt"] * (len(second) - 1)]
    assert first == third == [*second[:-1], ""]


def test_jobs_of_the_main_process(results: Results) -> None:
    """All processes work on them; an error in one is raised in the main process, which can start another job."""
    main, *others = (results[rank]["jobs"] for rank in range(3))
    assert (main["sum"], main["again"], main["nested"]) == (12, 6, 6)
    assert (main["failure 0"], main["failure 1"]) == ("process 0", "process 1")
    assert main["not pickled"] == 1  # by itself
    for found in (main, *others):
        assert (found["result"], found["alone"], found["raised"]) == ("done", 1, "process 1")
    assert all("sum" not in found for found in others)


def test_an_error_that_cannot_be_sent_is_described(results: Results) -> None:
    first, second, third = (results[rank]["failures"]["unpicklable"] for rank in range(3))
    assert second == ("Unpicklable", "cannot be sent")
    assert first == third == ("RunError", "Unpicklable: cannot be sent")


def test_out_of_memory_in_one_process_all_continue_with_smaller_chunks(results: Results) -> None:
    found = [results[rank]["out of memory"] for rank in range(3)]
    model = make(dropping_conv_net)
    torch.manual_seed(3)
    loss, _ = plain_step(model, members.recall(), some_images().split(2), torch.arange(20) // 4)
    want = take_gradients(model)
    for each in found:
        assert (each["chunk_size"], each["chunks"]) == (2, 10)
        assert difference([each["loss"], *each["gradients"]], [loss, *want]) < EXACT
    notices = ["graphs are no longer kept", "chunk_size is now 4", "chunk_size is now 2"]
    assert found[0]["warned"] == [f"Out of memory; {notice}" for notice in notices]
    assert found[1]["warned"] == found[2]["warned"] == []


def test_a_process_that_ends_is_noticed(results: Results) -> None:
    """All other processes notice it, not only those that wait for it, and long before a timeout."""
    for rank in range(3):
        assert "One of the processes has ended or can no longer be reached." in results[rank]["lost"]


# What processes send each other


def test_exchanges(results: Results) -> None:
    found = [results[rank]["exchanges"] for rank in range(3)]
    for rank, each in enumerate(found):
        assert each["gathered"] == [(0, 0), (1, -1), (2, -2)]
        assert each["rows"].tolist() == [[1, 1], [2, 2], [2, 2]]
        assert each["own rows"].tolist() == [[], [[0, 0]], [[3, 3], [6, 6]]][rank]
        unused, used, double = each["gradients"]
        assert unused is None
        assert used.tolist() == [3.0] * 3
        assert double.tolist() == [3.0] * 2
        first, tensors = each["broadcast"]
        assert first == {"rank": 0}
        assert tensors["half"].tolist() == [0, 0]
        assert tensors["half"].dtype == torch.bfloat16
        assert tensors["flag"].item() is True
        assert each["machine"] == 3


def test_the_main_process_may_work_for_long(results: Results) -> None:
    """The others receive its result, and heartbeats while they wait."""
    for rank in range(3):
        result, done, words = results[rank]["exchanges"]["waited"]
        assert result == "result"
        assert done == ([0] if rank == 0 else [])
        assert words >= 5


def test_a_single_process_agrees_with_itself() -> None:
    assert ALONE.gather(3, 4) == [(3, 4)]
    assert ALONE.on_main(lambda: 5) == 5
    assert ALONE.is_main
    with pytest.raises(KeyError), ALONE.together():
        raise KeyError
